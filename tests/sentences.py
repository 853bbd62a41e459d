"""What a page of the documentation says, sentence by sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"

_FENCE = re.compile(r"^\s*```(\w*)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_BEGINS_ITEM = re.compile(r"^\s*[-*] ")
_ROLE = re.compile(r"\{[\w:]+\}`([^`<]*?)\s*(?:<[^`>]*>)?`")
_LINK = re.compile(r"\[([^\]`]*(?:`[^`]*`[^\]`]*)*)\]\([^)\s]+\)")
_LEAD = re.compile(r"^\*\*([^*]+)\.\*\*(?=\s)")
_GAP = "\0"
_CODE = re.compile(r"`[^`]+`")
_END = re.compile(r"(?<=[.!?])\s+")


def sentences(page: str) -> list[str]:
    """The sentences of a page's prose, list items and definitions, each as one line.

    Bold print, roles and links are left out, code keeps its backticks. The term of a definition,
    or a bold lead, stands before its first sentence: "`off`: Not at all." Headings and code blocks
    say nothing.
    """
    found: list[str] = []
    for paragraph in _paragraphs(page):
        text = _CODE.sub(lambda code: code[0].replace(" ", _GAP), _plain(paragraph))
        found += [part.replace(_GAP, " ") for part in _END.split(text) if part]
    return found


def code_blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page that are marked as being in this language."""
    found: list[list[str]] = []
    inside = None
    for line in page.splitlines():
        if fence := _FENCE.match(line):
            inside = fence[1] if inside is None else None
            if inside == language:
                found.append([])
        elif inside == language and found:
            found[-1].append(line)
    return ["\n".join(_dedented(lines)) for lines in found]


def nearest(sentence: str, others: list[str]) -> str:
    """The one of the others that has most words of it, in whatever order; empty if none has any."""
    words = set(sentence.split())

    def likeness(other: str) -> float:
        theirs = set(other.split())
        return len(words & theirs) / len(words | theirs)

    best = max(others, key=likeness, default="")
    return best if best and likeness(best) > 0.2 else ""


def _dedented(lines: list[str]) -> list[str]:
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]


def _paragraphs(page: str) -> Iterator[str]:
    lines: list[str] = []
    in_code = False
    for line in [*_COMMENT.sub("", page).splitlines(), ""]:
        if _FENCE.match(line):
            in_code = not in_code
            line = ""
        elif in_code:
            continue
        begins = _BEGINS_ITEM.match(line) is not None
        if not line.strip() or begins or line.startswith("#"):
            if lines:
                yield " ".join(lines)
            lines = []
        if line.strip() and not line.startswith("#"):
            text = _BEGINS_ITEM.sub("", line).strip()
            if text.startswith(": ") and lines:  # a definition: its term is the line before
                text = f"{lines.pop()}{text}"
            lines.append(text)


def _plain(text: str) -> str:
    text = _LEAD.sub(r"\1:", _LINK.sub(r"\1", _ROLE.sub(r"\1", text)))
    return text.replace("**", "")
