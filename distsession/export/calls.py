"""From the calls of a notebook's functions to plain Python."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from distsession.export.history import Call, Need, need, stored_names
from distsession.export.translate import Plain, indented

__all__ = ["call_to_python"]


def call_to_python(call: Call, number: int) -> Plain:
    """A function around what the notebook had: its names do not mix with those of the ranks.

    Names that the notebook does not have are the script's, as they are the ranks' in a session.
    """
    plain = Plain("")
    lines: list[str] = []
    needs = dict(call.needs)
    title = next(iter(needs))
    todo = list(needs)
    sources: list[str] = []
    while todo:
        name = todo.pop(0)
        each = needs[name]
        if each.problem:
            plain.problems.append(f"it cannot be written, since {each.problem}")
        elif each.source_of is None:
            lines += each.text.split("\n")
        else:
            source = _source(each.source_of, plain)
            sources.append(source)
            for more in _outside(each.source_of, source, needs):
                needs[more.name] = more.need
                todo.append(more.name)
    both = [
        name
        for each in needs.values()
        if inspect.isfunction(each.source_of)
        for name in stored_names(each.source_of.__code__)
        if name in needs
    ]
    if both:
        plain.problems.append(f"it stores the global {both[0]}, which the notebook has, too")
    begin = f"_call_{number}"
    body = "\n".join([*lines, *reversed(sources), f"{title}({call.arguments})"])
    if plain.problems:
        return plain
    plain.code = f"def {begin}():\n{indented(body)}\n\n\n"
    if call.times > 1:
        plain.code += f"for _ in range({call.times}):\n    {begin}()"
    else:
        plain.code += f"{begin}()"
    return plain


class _Named:
    def __init__(self, name: str, need: Need):
        self.name, self.need = name, need


def _outside(item: Any, source: str, known: dict[str, Need]) -> list[_Named]:
    """What the definition itself uses of the notebook: decorators, defaults, annotations."""
    if not source:
        return []
    values = getattr(item, "__globals__", None) or vars(sys.modules["__main__"])
    return [
        _Named(name, need(name, values[name]))
        for name in sorted(set(_names_of_definition(ast.parse(source))))
        if name in values and name not in known and not name.startswith("__")
    ]


def _names_of_definition(node: ast.AST) -> Iterator[str]:
    """The names that are looked up when a function or class is defined, not when it is called."""
    if isinstance(node, ast.Name):
        yield node.id
    for name, child in ast.iter_fields(node):
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _names_of_definition(each)


def _source(item: Any, plain: Plain) -> str:
    try:
        source = inspect.getsource(item) if inspect.isfunction(item) else _class_source(item)
        source = textwrap.dedent(source).strip("\n")
        ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        plain.problems.append(f"the source of {item.__qualname__} is not known")
        return ""
    return source


def _class_source(item: type) -> str:
    """The source of a class; ``inspect`` does not find that of a class of a notebook.

    Raises:
        OSError: It is not to be found.
    """
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(item)
    for method in vars(item).values():
        if not inspect.isfunction(method):
            continue
        lines, _ = inspect.findsource(method)
        first = method.__code__.co_firstlineno
        for node in ast.walk(ast.parse("".join(lines))):
            last = getattr(node, "end_lineno", 0)
            if isinstance(node, ast.ClassDef) and node.name == item.__name__:
                begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if begin <= first <= last:
                    return "".join(lines[begin - 1 : last])
    raise OSError(item.__qualname__)
