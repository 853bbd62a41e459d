"""Texts that differ in some words, as one text and a list of these words.

Pure functions.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from distsession.display.nested import shortened_within

__all__ = ["Merged", "merge_texts"]

MAX_PLACES = 8
"""Places in which texts may differ; beyond that each is given as it is."""
MAX_TEXT_CHARS = 200
"""Characters of what may stand for a letter; a longer text is given as it is."""
MAX_LINE_CHARS = 2000
MAX_LINES = 40
"""Lines that are told of what a rank says instead."""
_WORD_ENDS = re.compile(r"(\s+|[,;:.](?=\s|$))")
"""Spaces, and the punctuation before them, which is no part of a word that differs."""


class Merged:
    """Texts of ranks as one, with ``<a>``, ``<b>`` and so on where they differ.

    Attributes:
        texts: The texts with these places marked.
        differing: For each rank what stands in its place, by letter.
        instead: Where texts are long and differ in more than words, that of the first rank is among
            ``texts`` as it is: for each other rank the lines that it has instead of some of these.
    """

    def __init__(
        self,
        texts: Sequence[str],
        differing: Mapping[int, Mapping[str, str]],
        instead: Mapping[int, Sequence[str]],
    ):
        self.texts = tuple(texts)
        self.differing = differing
        self.instead = instead


def merge_texts(by_rank: Mapping[int, Sequence[str]]) -> Merged:
    """Put texts together word by word; all ranks have as many of them.

    Args:
        by_rank: The texts of each rank, such as the message of an error and its notes.
    """
    ranks = list(by_rank)
    texts: list[str] = []
    columns: list[dict[int, str]] = []
    instead: dict[int, list[str]] = {rank: [] for rank in ranks}
    for each in zip(*(by_rank[rank] for rank in ranks), strict=True):
        text, differ = _merge(each, len(columns))
        if any(
            len(piece) > MAX_TEXT_CHARS or "\n" in piece for pieces in differ for piece in pieces
        ):
            for rank, other in zip(ranks, each, strict=True):
                instead[rank] += _lines_instead(each[0], other)
            text, differ = each[0], []
        texts.append(text)
        columns += [dict(zip(ranks, column, strict=True)) for column in differ]
    differing = {
        rank: {_letter(n): column[rank] for n, column in enumerate(columns)} for rank in ranks
    }
    return Merged(texts, differing, instead)


def _lines_instead(first: str, other: str) -> list[str]:
    """The lines of a text that another one has not; of many the first and the last."""
    before, after = first.splitlines(), other.splitlines()
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    found: list[str] = []
    for kind, begin, end, start, stop in matcher.get_opcodes():
        if kind == "delete":
            found += [f"(not: {line.strip()})" for line in before[begin:end] if line.strip()]
        elif kind != "equal":
            found += [line.strip() for line in after[start:stop] if line.strip()]
    found = [shortened_within(line, MAX_LINE_CHARS) for line in found]
    if len(found) <= MAX_LINES:
        return found
    half = MAX_LINES // 2
    return [*found[:half], f"({len(found) - 2 * half} more lines)", *found[-half:]]


def _letter(number: int) -> str:
    """``a`` to ``z``, and then ``a2`` and so on."""
    again, at = divmod(number, 26)
    return string.ascii_lowercase[at] + (str(again + 1) if again else "")


def _merge(texts: Sequence[str], before: int) -> tuple[str, list[list[str]]]:
    """One text, and what differs in it; letters go on from those that have been used before."""
    if len(set(texts)) == 1:
        return texts[0], []
    words = [_WORD_ENDS.split(text) for text in texts]
    rows = list(zip(*words, strict=True)) if len({len(each) for each in words}) == 1 else []
    runs = [
        (same, ["".join(parts) for parts in zip(*run, strict=True)])
        for same, run in groupby(rows, key=lambda row: len(set(row)) == 1)
    ]
    runs = _joined(runs)
    places = sum(not same for same, _ in runs)
    if not runs or before + places > MAX_PLACES:
        runs = [(False, list(texts))]
    text = ""
    differ: list[list[str]] = []
    for same, pieces in runs:
        if same:
            text += pieces[0]
        else:
            text += f"<{_letter(before + len(differ))}>"
            differ.append(pieces)
    return text, differ


def _joined(runs: list[tuple[bool, list[str]]]) -> list[tuple[bool, list[str]]]:
    """What differs on both sides of a mere space is one place."""
    joined: list[tuple[bool, list[str]]] = []
    for same, pieces in runs:
        is_between = len(joined) > 1 and not same and not joined[-1][1][0].strip(" ")
        if is_between and joined[-1][0]:
            space = joined.pop()[1]
            first = joined.pop()[1]
            pieces = ["".join(parts) for parts in zip(first, space, pieces, strict=True)]
        joined.append((same, pieces))
    return joined
