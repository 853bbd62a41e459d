"""Completion and inspection in cells for the ranks, by what the ranks have.

The ranks are asked for a moment only. Where none answers in time, IPython answers from the
notebook's own names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.completerlib import module_completion
from IPython.utils.tokenutil import token_at_cursor

from distsession.cluster.kept import kept_sessions
from distsession.devices import NCCL_NAMES
from distsession.display import render
from distsession.errors import DistsessionError
from distsession.notebook.autopx import is_plain
from distsession.protocol.messages import CompletionReply
from distsession.ranks import parse_ranks
from distsession.session import Session, current_session

try:
    from IPython.core.completer import SimpleCompletion, context_matcher
except ImportError:  # before IPython 8.6 Tab knows the notebook's own names alone
    context_matcher = None

__all__ = ["RankCode", "RankCompleter", "rank_code"]

COMPLETION_TIMEOUT_S = 0.3
"""Seconds that ranks have to answer."""
MAX_COMPLETION_RANKS = 4
"""How many ranks are asked for completions."""

BACKENDS = ("gloo", *NCCL_NAMES, "mpi", "ucc", "cpu:gloo,cuda:nccl")
"""Names that are offered; which of them there are, the ranks' torch knows."""
MAX_RANK_WORDS = 16

_ASSIGNMENT = re.compile(r"^\s*(?:\w+\s*=\s*(?=%))?")
_LINE = re.compile(r"^\s*(?:\w+\s*=\s*)?%distributed\s+(?:--diff\s+)?")


@dataclass(frozen=True)
class RankCode:
    """The part of a cell that is for the ranks, up to the cursor.

    Attributes:
        code: The part.
        cursor: Where the cursor is in it.
        line: What stands behind the magic.
    """

    code: str
    cursor: int
    line: str = ""


def rank_code(cell: str, cursor: int, is_plain_for_ranks: bool = False) -> RankCode | None:
    """Which part of a cell is for the ranks, if the cursor is in it."""
    if cell.lstrip().startswith("%%distributed"):
        start = len(cell) - len(cell.lstrip())
        first, newline, body = cell[start:].partition("\n")
        start += len(first) + len(newline)
        if not newline or cursor < start:
            return None
        return RankCode(body, cursor - start, first.removeprefix("%%distributed"))
    begin = cell.rfind("\n", 0, cursor) + 1
    end = cell.find("\n", cursor)
    line = cell[begin : len(cell) if end < 0 else end]
    magic = _LINE.match(line)
    if magic is not None:
        begin += magic.end()
        code = line[magic.end() :]
        return RankCode(code, cursor - begin) if cursor >= begin else None
    if is_plain_for_ranks and is_plain(cell):
        return RankCode(cell, cursor)
    return None


class RankCompleter:
    """Hooks into a shell's completer and its kernel's inspection.

    Args:
        shell: Of the notebook.
        parsers: Of the magics' first lines, by name with its percent signs.
        is_automatic: Whether plain cells go to the ranks.
    """

    def __init__(
        self,
        shell: Any,
        parsers: Mapping[str, Callable[[], argparse.ArgumentParser]],
        is_automatic: Callable[[], bool],
    ):
        self._shell = shell
        self._parsers = parsers
        self._is_automatic = is_automatic
        self._inspect: Any = None

        self._matchers: list[Any] = []
        if context_matcher is not None:

            @context_matcher(priority=1000, identifier="distsession.ranks")  # type: ignore[untyped-decorator]
            def matcher(context: Any) -> Any:
                return self._handle_completion(context)

            self._matchers.append(matcher)

    def register(self) -> None:
        """Hook in."""
        self._shell.Completer.custom_matchers.extend(self._matchers)
        kernel = getattr(self._shell, "kernel", None)
        if kernel is not None:
            self._inspect = kernel.do_inspect
            kernel.do_inspect = self._handle_inspect

    def unregister(self) -> None:
        """Take the hooks away."""
        matchers = self._shell.Completer.custom_matchers
        for matcher in self._matchers:
            if matcher in matchers:
                matchers.remove(matcher)
        kernel = getattr(self._shell, "kernel", None)
        if kernel is not None and vars(kernel).get("do_inspect") == self._handle_inspect:
            del kernel.do_inspect

    # --- completion -------------------------------------------------------------------------------

    def _handle_completion(self, context: Any) -> Any:
        nothing: dict[str, Any] = {"completions": []}
        lines = context.full_text.split("\n")
        before = sum(len(line) + 1 for line in lines[: context.cursor_line])
        line = lines[context.cursor_line][: context.cursor_position]
        line = _ASSIGNMENT.sub("", line)
        if context.cursor_line == 0 or line.startswith("%session"):
            found = self._magic_line_matches(line)
            if found:
                return found
        cursor = before + context.cursor_position
        part = rank_code(context.full_text, cursor, self._is_automatic())
        if part is None or _is_for_ipython(part.code[: part.cursor]):
            return nothing
        code = part.code[: part.cursor]
        answers = request_completion(code, part.line, inspect=False)
        matches = {text: kind for answer in answers.values() for text, kind in answer.matches}
        if not matches:
            return nothing
        start = next(answer.start for answer in answers.values() if answer.matches)
        return {
            "completions": [
                SimpleCompletion(text=text, type=kind) for text, kind in matches.items()
            ],
            "matched_fragment": code[start:],
            "suppress": True,
        }

    def _magic_line_matches(self, line: str) -> Any:
        """What may follow in a magic's own line."""
        if re.fullmatch(r"%distributed +-[-\w]*", line):
            begun = line[line.rfind(" ") + 1 :]
            flags = [SimpleCompletion(text=each, type="magic") for each in ("--diff", "--help")]
            return {
                "completions": [each for each in flags if each.text.startswith(begun)],
                "matched_fragment": begun,
                "suppress": True,
            }
        name, space, rest = line.partition(" ")
        make = self._parsers.get(name)
        if make is None or not space:
            return None
        word = rest[rest.rfind(" ") + 1 :]
        parser, given = _command(make(), rest[: len(rest) - len(word)].split())
        action, begun = _awaited(parser, given, word)
        if action is not None:
            begun = begun[begun.rfind(",") + 1 :]
            words = self._values(parser, action, begun)
        else:
            words = _next_words(parser, given)
            for action in parser._actions:
                is_awaited = not given or action.nargs == "+"
                if is_awaited and not (action.option_strings or action.choices):
                    words += self._values(parser, action, begun)
        completions = [
            SimpleCompletion(text=each, type="magic") for each in words if each.startswith(begun)
        ]
        return {"completions": completions, "matched_fragment": begun, "suppress": True}

    def _values(
        self, parser: argparse.ArgumentParser, action: argparse.Action, begun: str
    ) -> list[str]:
        """What an argument may be."""
        if action.choices:
            return [str(choice) for choice in action.choices]
        match action.dest:
            case "backend":
                return list(BACKENDS)
            case "push":
                hidden = self._shell.user_ns_hidden
                names = [name for name in self._shell.user_ns if name not in hidden]
                return [name for name in names if not name.startswith("_")]
            case "pull" | "restore" | "check":
                return _names_on_ranks(begun)
            case "on":
                return _host_words()
            case "hosts" if parser.prog.endswith(" restart"):
                return _host_words()
            case "name" if parser.prog.endswith(" attach"):
                return [kept.name for kept in kept_sessions()]
            case "preload" | "modules":
                return _top_modules()
            case "ranks" | "debug" | "profile" if not parser.prog.endswith(" start"):
                return _rank_words()
        return []

    # --- inspection -------------------------------------------------------------------------------

    def _handle_inspect(self, code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> Any:
        text = self._inspection_text(code, cursor_pos)
        if not text:
            return self._inspect(code, cursor_pos, *args, **kwargs)
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

    def _inspection_text(self, code: str, cursor: int) -> str:
        try:
            part = rank_code(code, cursor, self._is_automatic())
            name = token_at_cursor(part.code, part.cursor) if part is not None else ""
        except Exception:  # of a tokenizer that does not like the code
            return ""
        if part is None or not name or name.startswith("%"):
            return ""
        answers = request_completion(name, part.line, inspect=True)
        return render.fold_text(
            {rank: answer.text for rank, answer in answers.items() if answer.text}
        )


def _top_modules() -> list[str]:
    """The modules that can be imported here; not their parts, for which they would be imported."""
    return [name for name in module_completion("import ") if not name.startswith("_")]


def request_completion(code: str, line: str, *, inspect: bool) -> dict[int, CompletionReply]:
    """Ask ranks about code that a magic with this line would send to them."""
    try:
        session = current_session()
        ranks = _ranks(session, line)
        launcher = session.launcher
        dead = launcher.dead_ranks()
        living = [rank for rank in ranks if rank not in dead]
        return launcher.complete(living[:MAX_COMPLETION_RANKS], code, inspect, COMPLETION_TIMEOUT_S)
    except DistsessionError:
        return {}


def _names_on_ranks(begun: str) -> list[str]:
    """Variables of the ranks."""
    answers = request_completion(begun, "", inspect=False)
    found = {text: kind for answer in answers.values() for text, kind in answer.matches}
    return [text for text, kind in found.items() if kind == "instance"]


def _rank_words() -> list[str]:
    try:
        ranks = current_session().ranks
    except DistsessionError:
        return []
    return [*map(str, ranks[:MAX_RANK_WORDS]), *([f"0-{ranks[-1]}"] if len(ranks) > 1 else [])]


def _host_words() -> list[str]:
    try:
        return [host.name for host in current_session().hosts]
    except DistsessionError:
        return []


def _ranks(session: Session, line: str) -> Sequence[int]:
    first = (line.split() or [""])[0]
    try:
        if found := re.search(r"--on[ =]\s*(\S+)", line):
            return session.on(*found[1].split(",")).ranks
        return parse_ranks(first, session.world_size) if first[:1].isdigit() else session.ranks
    except DistsessionError:
        return session.ranks


def _is_for_ipython(code: str) -> bool:
    """Whether the line is a magic, a shell command or an import, which the notebook completes."""
    line = code[code.rfind("\n") + 1 :].lstrip()
    return line.startswith(("%", "!", "import ", "from "))


# --- the magics' own lines ------------------------------------------------------------------------


def _command(
    parser: argparse.ArgumentParser, given: Sequence[str]
) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the command that a line has named, and what it has of that one's."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and given and given[0] in action.choices:
            return _command(action.choices[given[0]], given[1:])
    return parser, list(given)


def _awaited(
    parser: argparse.ArgumentParser, given: Sequence[str], word: str
) -> tuple[argparse.Action | None, str]:
    """The flag whose value is being typed, and what of the value is there."""
    flag, equals, begun = word.partition("=")
    if not equals:
        flag, begun = (given[-1] if given else ""), word
    for action in parser._actions:
        if flag in action.option_strings and action.nargs != 0:
            is_optional = action.nargs == "?" and begun.startswith("-")
            return (None if is_optional else action), begun
    return None, word


def _next_words(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """Commands and flags that a line may go on with."""
    words: list[str] = []
    for action in parser._actions:
        if action.choices and not action.option_strings:
            words += [str(choice) for choice in action.choices]
        words += [text for text in action.option_strings if text.startswith("--")]
    return [word for word in words if word not in given]
