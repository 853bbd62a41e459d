"""Texts that differ in some words, as one text and a list of these words.

Pure functions.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from itertools import groupby

__all__ = ["Merged", "merge_texts"]

MAX_PLACES = 8
"""Places in which texts may differ; beyond that each is given as it is."""
MAX_TEXT_CHARS = 200
_WORD_ENDS = re.compile(r"(\s+|[,;:.](?=\s|$))")
"""Spaces, and the punctuation before them, which is no part of a word that differs."""


class Merged:
    """Texts of ranks as one, with ``<a>``, ``<b>`` and so on where they differ.

    Attributes:
        texts: The texts with these places marked.
        differing: For each rank what stands in its place, by letter.
    """

    def __init__(self, texts: Sequence[str], differing: Mapping[int, Mapping[str, str]]):
        self.texts = tuple(texts)
        self.differing = differing


def merge_texts(by_rank: Mapping[int, Sequence[str]]) -> Merged:
    """Put texts together word by word; all ranks have as many of them.

    Args:
        by_rank: The texts of each rank, such as the message of an error and its notes.
    """
    ranks = list(by_rank)
    texts: list[str] = []
    columns: list[dict[int, str]] = []
    for each in zip(*(by_rank[rank] for rank in ranks), strict=True):
        text, differ = _merge(each, len(columns))
        texts.append(text)
        columns += [dict(zip(ranks, column, strict=True)) for column in differ]
    differing = {
        rank: {_letter(n): column[rank] for n, column in enumerate(columns)} for rank in ranks
    }
    return Merged(texts, differing)


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
            differ.append([_short(piece) for piece in pieces])
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


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_CHARS else f"{line[: MAX_TEXT_CHARS - 3]}..."
