"""Lines of ranks that differ in numbers alone, with these below each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["aligned", "labelled"]

_NUMBER = re.compile(r"(?<![\w.])([-+]?\d+|[-+]?(?:nan|inf)\b)(\.\d*)?([eE][-+]?\d+)?(?![\w.])")


def aligned(texts: Sequence[str]) -> list[str] | None:
    """The same lines with spaces before and after numbers; None where they are not alike.

    Args:
        texts: Of ranks. They are alike if each is one line, and all have the same between numbers.
    """
    if len(texts) < 2 or any("\n" in text for text in texts):
        return None
    between = [_NUMBER.sub("\0", text) for text in texts]
    if "\0" not in between[0] or any(each != between[0] for each in between):
        return None
    columns = zip(*([found for found in _NUMBER.finditer(text)] for text in texts), strict=True)
    padded = [_column([(found[1], found[0][len(found[1]) :]) for found in one]) for one in columns]
    parts = between[0].split("\0")
    lines = []
    for row in zip(*padded, strict=True):
        line = parts[0] + "".join(map("".join, zip(row, parts[1:], strict=True)))
        lines.append(line.rstrip() if not parts[-1] else line)
    return lines


def _column(numbers: Sequence[tuple[str, str]]) -> list[str]:
    left = max(len(whole) for whole, _ in numbers)
    right = max(len(rest) for _, rest in numbers)
    return [f"{whole:>{left}}{rest:<{right}}" for whole, rest in numbers]


def labelled(labels: Sequence[str], texts: Sequence[str]) -> list[str] | None:
    """Lines with the labels before them, as columns; None where they are not alike.

    Args:
        labels: One for each line.
        texts: The lines.
    """
    lines = aligned(texts)
    if lines is None:
        return None
    width = max(map(len, labels))
    return [f"{label:<{width}} {line}" for label, line in zip(labels, lines, strict=True)]
