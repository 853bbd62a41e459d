"""Tables that are made from the code, so that they cannot differ from it.

``{options-table}`` lists the fields of ``SessionOptions``. ``{parser-table} module:function`` lists
what the argument parser that the function makes understands; a second word chooses a command.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from sphinx.application import Sphinx

from distsession import options

Row = Sequence[nodes.Node]


class OptionsTable(Directive):
    """Each option as keyword, flag and environment variable, with what it does."""

    def run(self) -> list[nodes.Node]:
        texts = _attribute_texts(options.SessionOptions)
        parser = argparse.ArgumentParser(add_help=False)
        options.add_arguments(parser)
        flags = {action.dest: _name(action) for action in parser._actions}
        rows = []
        for field in fields(options.SessionOptions):
            if field.name not in texts:
                raise self.error(f"SessionOptions documents no attribute {field.name!r}")
            given = [field.name, flags[field.name], options.PREFIX + field.name.upper()]
            rows.append([*(_code(text) for text in given), _text(texts[field.name])])
        return [_table(["Keyword", "Flag", "Environment variable", "Meaning"], rows)]


class ParserTable(Directive):
    """The commands and arguments of a parser."""

    required_arguments = 1
    optional_arguments = 1
    option_spec = {"commands": directives.flag}

    def run(self) -> list[nodes.Node]:
        module, _, function = self.arguments[0].partition(":")
        parser = getattr(importlib.import_module(module), function)()
        commands = next(iter(_commands(parser)), None)
        if len(self.arguments) > 1 and commands is not None:
            parser = commands.choices[self.arguments[1]]
        if "commands" in self.options and commands is not None:
            rows = [
                [_code(f"{parser.prog} {choice.dest}"), _text(_sentence(choice.help))]
                for choice in commands._choices_actions
            ]
            return [_table(["Command", "Meaning"], rows)]
        actions = [a for a in parser._actions if not isinstance(a, argparse._SubParsersAction)]
        rows = [[_code(_name(action)), _text(_sentence(action.help))] for action in actions]
        return [_table(["Argument", "Meaning"], rows)]


def _commands(parser: argparse.ArgumentParser) -> Iterator[Any]:
    return (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"[{action.dest}]"
    names = ", ".join(action.option_strings)
    takes_value = action.nargs != 0
    return f"{names} {action.metavar or action.dest.upper()}" if takes_value else names


def _sentence(text: str | None) -> str:
    text = text or ""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _attribute_texts(cls: type) -> dict[str, str]:
    """The ``Attributes:`` of a Google-style docstring."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _code(text: str) -> nodes.Node:
    return nodes.paragraph("", "", nodes.literal(text, text))


def _text(text: str) -> nodes.Node:
    """A paragraph in which ``literals`` are literals."""
    paragraph = nodes.paragraph()
    for number, part in enumerate(text.split("``")):
        paragraph += nodes.literal(part, part) if number % 2 else nodes.Text(part)
    return paragraph


def _table(head: Sequence[str], rows: Sequence[Row]) -> nodes.table:
    group = nodes.tgroup(cols=len(head))
    for column, name in enumerate(head):
        lengths = [len(name), *(len(row[column].astext()) for row in rows)]
        group += nodes.colspec(colwidth=min(60, max(lengths)))
    top = nodes.thead("", _row([nodes.paragraph(text=text) for text in head]))
    group += [top, nodes.tbody("", *(_row(row) for row in rows))]
    return nodes.table("", group, classes=["colwidths-auto"])


def _row(cells: Row) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("options-table", OptionsTable)
    app.add_directive("parser-table", ParserTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
