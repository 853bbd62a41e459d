"""The code blocks of the documentation, and what is to be done with each.

A reader sees the blocks; comments of the Markdown, which nobody sees, say what they leave out:

``<!-- not run: REASON -->``
    The next block is not run, or not compared.
``<!-- run: CODE -->``
    A cell that is not shown. What it shows is compared with the text block that follows.
``<!-- file: NAME -->``
    The next block is a file, which is written and not run.
``<!-- typed: ANSWER | ANSWER -->``
    What is typed while the next block runs.
"""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
ELSEWHERE = {"hangs.md": "tests/integration/test_hangs_doc.py"}
"""Pages whose examples another module of tests runs and compares, in sessions of its own."""
SHOWN = "text"
"""The language of a block that shows what the one before it puts out."""

_COMMENT = re.compile(r"\s*<!-- *(not run|run|file|typed):\s*(.*?)\s*-->\s*", re.DOTALL)
_HOW = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_VARIES = (
    (r"\x1b\[[\d;]*m", ""),
    (r"\b(In|Cell In)\[\d+\]", r"\1[N]"),
    (r"\b\d+(\.\d+)? ?(ms|s|us)\b", "N s"),
    (r"\b\d[\d,]*(\.\d+)? ?(B|bytes|kB|MB|MiB|GB|GiB)\b", "N B"),
    (r"\b\d+(\.\d+)? ?%", "N %"),
    (r"\b\d+ operations, the longest", "N operations, the longest"),
    (r"#\d+", "#N"),
    (r"\((?:[\w.-]+), (cpu|cuda(?::\d+)?)\)", r"(HOST, \1)"),
    (r"\bpid \d+", "pid N"),
    (r"\n\.\.\.$", "..."),  # of a line
    (r"-{3,}", "---"),  # the line below a heading is as long as what stands there
    (r"\bmm: mat1", "mat1"),  # so torch 2.15 begins it
)
if sys.version_info >= (3, 13):  # where breakpoint() stops at its own line
    _VARIES += (
        (r"\(\d+\)<module>\(\)\n(.*)-> .*", r"(N)<module>()\n\1-> there"),
        (r"(in the debugger of rank \d+ at In\[N\] line )\d+", r"\1N"),
    )


@dataclass(frozen=True)
class Block:
    """A code block of a page, or a hidden cell.

    Attributes:
        line: Where it begins on the page, counted from 1.
        not_run: Why it is not run, or not compared; empty for one that is.
        file: What it is to be written to, instead of being run.
        typed: Answers to what is asked while it runs.
    """

    language: str
    text: str
    line: int
    not_run: str = ""
    file: str = ""
    typed: tuple[str, ...] = ()

    @property
    def is_marked(self) -> bool:
        return bool(self.not_run)


@dataclass(frozen=True)
class Step:
    """What is run, or written, and what is to be seen then."""

    block: Block
    shown: Block | None = None


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, with what its comments say of them."""
    return list(_blocks(MarkdownIt().parse(page)))


def _blocks(tokens: list[Token]) -> Iterator[Block]:
    said: dict[str, str] = {}
    for token in tokens:
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            for kind, text in _COMMENT.findall(token.content):
                if kind == "run":
                    yield _block("python", text, line, said)
                    said = {}
                else:
                    said[kind] = " ".join(text.split())
        elif token.type in ("fence", "code_block"):
            yield _block(token.info.strip(), token.content.rstrip("\n"), line, said)
            said = {}


def _block(language: str, text: str, line: int, said: dict[str, str]) -> Block:
    typed = [answer.strip() for answer in said.get("typed", "").split("|") if answer.strip()]
    not_run, file = said.get("not run", ""), said.get("file", "")
    return Block(language, text, line, not_run, file, tuple(typed))


def steps(page: str) -> list[Step]:
    """What a page has its reader do, in order. Directives of Sphinx are none."""
    found: list[Step] = []
    for block in blocks(page):
        if block.language.startswith("{"):
            continue
        if block.language == SHOWN and not block.is_marked:
            if not found or found[-1].shown or found[-1].block.is_marked:
                raise ValueError(f"line {block.line}: nothing that is run has shown this text")
            found[-1] = replace(found[-1], shown=block)
        else:
            found.append(Step(block))
    return found


def is_as_shown(shown: str, came: str) -> bool:
    """Whether this came, but for what differs between machines and runs; ``...`` is any text."""
    return doctest.OutputChecker().check_output(_settled(shown), _settled(came), _HOW)


def _settled(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    text = "\n".join(lines)
    for varies, instead in _VARIES:
        text = re.sub(varies, instead, text, flags=re.MULTILINE)
    return f"{text}\n"
