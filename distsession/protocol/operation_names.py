"""Texts of the board that are read again: pairs of ranks, lines of code, parts of a description.

Other ranks and the kernel see of an operation only what fits into the board, as text. What of it
they need as data is written and read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "WORLD",
    "AnySource",
    "CodeLine",
    "Pair",
    "SplitSizes",
    "details_of",
    "group_title",
    "join_details",
    "root_of",
]

WORLD = "world"
"""The name of the default group."""


def group_title(name: str) -> str:
    """How a group is called in sentences."""
    return "the default group" if name == WORLD else name


class Pair(NamedTuple):
    """Where messages go, which are counted for each tag of each pair of ranks within a group.

    Attributes:
        group: Name of the group.
        source: The rank that sends; None for a receive from whoever sends first.
        target: The rank that receives.
        tag: torch's tag of the messages.
    """

    group: str
    source: int | None
    target: int
    tag: int = 0

    @property
    def name(self) -> str:
        """``world 0->1``, ``world any->1 tag 3``."""
        source = "any" if self.source is None else self.source
        return f"{self.group} {source}->{self.target}{f' tag {self.tag}' if self.tag else ''}"

    @classmethod
    def from_name(cls, name: str) -> Pair | None:
        """What :attr:`name` gives; None for the name of a group."""
        found = _PAIR.fullmatch(name) if "->" in name else None
        if found is None:
            return None
        group, source, target, tag = found.groups()
        return cls(group, None if source == "any" else int(source), int(target), int(tag or 0))


class CodeLine(NamedTuple):
    """A line of the user's code.

    Attributes:
        file: Label of a cell, such as ``"In[3]"``, or a file's name without its folder.
        line: Counted from 1.
    """

    file: str
    line: int

    @property
    def name(self) -> str:
        """``In[3] line 4``."""
        return f"{self.file} line {self.line}"

    @classmethod
    def from_name(cls, name: str) -> CodeLine:
        """What :attr:`name` gives."""
        file, _, line = name.rpartition(" line ")
        return cls(file, int(line))


def join_details(parts: Iterable[str]) -> str:
    """``float32 [4, 2], sum`` from its parts: a dtype, its shape, a reduction."""
    return ", ".join(part for part in parts if part).replace(", [", " [")


def details_of(description: str) -> list[str]:
    """The parts that :func:`join_details` was given; a dtype and its shape are one."""
    return _BETWEEN_DETAILS.split(description)


def root_of(description: str) -> int | None:
    """The root that is a part of a description; None where there is none."""
    found = _ROOT.search(description)
    return None if found is None else int(found[1])


class AnySource(NamedTuple):
    """Of a receive that takes what comes first, whoever sends it."""

    tag: int = 0

    @property
    def description(self) -> str:
        return f"any source, tag {self.tag}" if self.tag else "any source"

    @classmethod
    def from_description(cls, text: str) -> AnySource | None:
        found = _ANY_SOURCE.fullmatch(text)
        return None if found is None else cls(int(found[1] or 0))


class SplitSizes(NamedTuple):
    """How much a rank sends to each member in an all_to_all, and what it expects from each."""

    send: tuple[int, ...]
    receive: tuple[int, ...]

    @property
    def description(self) -> str:
        """As it stands at the end of a description."""
        send, receive = (",".join(map(str, sizes)) for sizes in self)
        return f"send {send} receive {receive}"

    @classmethod
    def from_description(cls, text: str) -> SplitSizes | None:
        """What is at the end of a rank's description; None if there are no sizes."""
        found = _SPLIT_SIZES.search(text)
        if found is None:
            return None
        return cls(*(tuple(int(n) for n in part.split(",") if n) for part in found.groups()))


_BETWEEN_DETAILS = re.compile(r", (?![^\[]*\])")
"""A comma that is not within a shape."""
_ROOT = re.compile(r"\broot (\d+)$")
_PAIR = re.compile(r"(.*) (\d+|any)->(\d+)(?: tag (\d+))?")
_ANY_SOURCE = re.compile(r"any source(?:, tag (\d+))?")
_SPLIT_SIZES = re.compile(r"send ([\d,]*) receive ([\d,]*)$")
