"""Command lines that say what was meant where a word is not known, for magics and the shell's."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Parser", "flags", "near"]


class Parser(argparse.ArgumentParser):
    """argparse, with hints.

    Attributes:
        also: Commands by other names that people type for them, which work and are not listed.
        instead: What to type instead of words that are no commands.
    """

    also: Mapping[str, str] = {}
    instead: Mapping[str, str] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever; the first word may be another name of a command."""
        if args and args[0] in self.also:
            args = [self.also[args[0]], *args[1:]]
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever; of a flag that is not known it is said which one is like it."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._chosen(found)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{parser.hint(unknown[0])}")
        return found

    def hint(self, unknown: str) -> str:
        """What may have been meant by a flag, or by a word too many."""
        return near(unknown, flags(self))

    @property
    def commands(self) -> Mapping[str, Parser]:
        """The parsers of its commands, if it has any."""
        found = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return found[0].choices if found else {}

    def _chosen(self, found: argparse.Namespace) -> Parser:
        """The parser of the command that a line has named."""
        verb = getattr(found, "verb", None)
        return self.commands.get(verb or "", self)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if not choices or value in choices:
            return
        hint = near(str(value), [*choices, *self.also])
        if value in self.instead:
            hint = f": {self.instead[value]}"
        raise argparse.ArgumentError(
            action, f"there is no {value!r}{hint} It takes {', '.join(choices)}"
        )


def near(text: str, known: Sequence[str]) -> str:
    """Asks whether something like it was meant; ends the sentence where nothing is."""
    found = difflib.get_close_matches(text.partition("=")[0], known, n=2)
    return f": did you mean {' or '.join(found)}?" if found else "."


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """The long flags of a parser."""
    return [
        text for action in parser._actions for text in action.option_strings if text[:2] == "--"
    ]
