"""An exception of user code as data."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from types import FrameType
from typing import Any, TypeVar

import torch

from distsession.engine.cause import has_reason
from distsession.engine.frames import outward
from distsession.engine.guarded import CALL_LIMIT_S, TakesTooLong, guarded
from distsession.engine.torch_errors import without_log_header
from distsession.errors import CollectiveError
from distsession.protocol.cells import is_cell, is_notebook_file
from distsession.protocol.messages import ErrorInfo, FrameInfo
from distsession.protocol.operation_names import CodeLine
from distsession.protocol.serialize import Frames, dump_value

__all__ = [
    "before",
    "describe",
    "forget_frames",
    "innermost",
    "is_in_collective",
    "is_own",
    "is_own_file",
    "is_user_code",
    "line_name",
    "name_cell",
    "pickled",
    "short_name",
    "stack",
]

T = TypeVar("T")

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = (
    sysconfig.get_path("stdlib") + os.sep,
    os.path.dirname(os.path.dirname(_TORCH)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
"""Folders of Python's own modules, of installed packages (where torch lies), and of ours."""
_NO_USERS = (*_LIBRARIES, "<")
_INSTALLED = (
    *(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")),
    f"{os.sep}torchinductor_",  # what torch.compile has written, for each user
)
_OWN = os.path.dirname(os.path.abspath(__file__))
_CONTEXT = 2
_MAX_FRAMES = 60
_MAX_CYCLE = 8
"""Of how many functions that call each other the recursion is recognised."""
_SHOWN_REPEATS = 3
"""How often the same may be called by itself before that is told as a number."""
_MAX_CHAIN = 8
_MAX_VALUE = 20_000
_MAX_PARTS = 50
"""Lines for notes, and for what a group contains."""
_MAX_WIDTH = 10
_NOT_SHOWN = "<it cannot be shown: its cause, its context or its traceback is no such thing>"
_notebook_cells: dict[str, str] = {}
"""By what their code has for a file: what the notebook calls those of its cells that are known."""


def describe(error: BaseException, depth: int = 0) -> ErrorInfo:
    """Everything about an exception that a person wants to see, as plain data.

    Never raises, whatever the exception's own methods do, and takes no longer than they may.
    """
    return guarded(
        lambda: _describe(error, depth), lambda _: ErrorInfo(type(error).__name__, _NOT_SHOWN)
    )


def _describe(error: BaseException, depth: int) -> ErrorInfo:
    cause, explicit = before(error)
    evalue = message_of(error)
    notes = _notes(error)
    if isinstance(error, BaseExceptionGroup):
        notes += tuple(itertools.islice(_within(error), _MAX_PARTS))
    return ErrorInfo(
        ename=type(error).__name__,
        evalue=evalue,
        frames=tuple(_frames(error)),
        notes=notes,
        cause=describe(cause, depth + 1) if cause is not None and depth < _MAX_CHAIN else None,
        cause_is_explicit=explicit,
        syntax=guarded(lambda: _syntax(error), lambda _: None, error),
    )


def _notes(error: BaseException) -> tuple[str, ...]:
    """The notes of an exception; what are no notes as Python's own traceback shows that."""
    notes = guarded(lambda: getattr(error, "__notes__", ()), lambda _: (), error)
    if notes is None:
        return ()
    if not isinstance(notes, list | tuple):
        return (_text(error, lambda: repr(notes), "what its __notes__ are"),)
    return tuple(
        _text(error, lambda note=note: str(note), "a note of it")  # type: ignore[misc]
        for note in notes[:_MAX_PARTS]
    )


def _within(group: BaseExceptionGroup, depth: int = 0) -> Iterator[str]:
    """A line for each exception within a group, and those within it, down to some depth."""
    indent = "  " * depth
    for part in group.exceptions[:_MAX_WIDTH]:
        at = innermost(tuple(_frames(part)))
        yield (
            f"{indent}contains {type(part).__name__}{f' at {at}' if at else ''}: {message_of(part)}"
        )
        if isinstance(part, BaseExceptionGroup):
            if depth < _MAX_CHAIN:
                yield from _within(part, depth + 1)
            else:
                yield f"{indent}  which contains more: the exception itself has them"
    if (more := len(group.exceptions) - _MAX_WIDTH) > 0:
        yield f"{indent}and {more:,} more"


def before(error: BaseException) -> tuple[BaseException | None, bool]:
    """The exception that came before one and is shown with it; whether it is its declared cause."""
    if error.__cause__ is not None:
        return error.__cause__, True
    context = error.__context__
    if not error.__suppress_context__:
        return context, False
    if context is not None and has_reason(error):  # which tells what came from within torch
        return context.__context__, False
    return None, False


def message_of(error: BaseException) -> str:
    """What an error says; never raises."""
    if isinstance(error, SyntaxError) and error.lineno is not None:  # the place stands by itself
        return _text(error, lambda: str(error.msg), "its message")
    if isinstance(error, CollectiveError):  # what torch says is for code that looks for it
        return error.own_text[:_MAX_VALUE]
    method = f"{type(error).__name__}.__str__"
    return _text(error, lambda: without_log_header(str(error)), "its message", method)


def _text(error: BaseException, make: Callable[[], str], what: str, method: str = "it") -> str:
    """A text that code of the user's makes, cut; why there is none, where that fails."""

    def instead(raised: BaseException) -> str:
        why = f"raises {type(raised).__name__}"
        if isinstance(raised, TakesTooLong):
            why = f"takes longer than {CALL_LIMIT_S:.0f} s"
        return f"<{what} cannot be shown: {method} {why}>"

    # of a class of the user's that is a string, too, only the characters
    return guarded(lambda: str.__getitem__(make(), slice(_MAX_VALUE)), instead, error)


def _syntax(error: BaseException) -> FrameInfo | None:
    """Where the code is that could not be read; None for any other error."""
    if not isinstance(error, SyntaxError) or error.lineno is None:
        return None
    if error.text is None and error.filename:  # of a compiler that was given no text
        error.text = linecache.getline(error.filename, error.lineno) or None
    # Python's own formatting: the place, the line, the marks below it, and what the error says.
    lines = traceback.format_exception_only(type(error), error)
    shown = itertools.takewhile(lambda line: line.startswith("    "), lines[1:])
    lineno, filename = int(error.lineno), str(error.filename or "<string>")
    context = tuple((lineno, line.rstrip("\n")) for line in shown)
    return FrameInfo(_notebook_cells.get(filename, filename), lineno, "<module>", context)


def _frames(error: BaseException) -> Iterator[FrameInfo]:
    frames = [(frame, lineno) for frame, lineno in traceback.walk_tb(error.__traceback__)]
    # Everything up to the last frame of this folder at the beginning is how we called the user.
    while frames and (is_own(frames[0][0]) or _is_of(frames[0][0], threading.__file__)):
        frames.pop(0)
    if isinstance(error, CollectiveError):  # raised by us within torch: neither explains anything
        while frames and _is_of(frames[-1][0], _TORCH, _OWN, contextlib.__file__):
            frames.pop()
    yield from _folded(frames)


def stack(frame: FrameType | None, awaits: object = None) -> tuple[FrameInfo, ...]:
    """The frames of a running thread, outermost first, without those by which we called it.

    Args:
        frame: Its innermost one.
        awaits: The user's coroutine that its event loop runs. Where no code of the user's is under
            way, it is told where that one waits.
    """
    frames = [(f, f.f_lineno) for f in outward(frame)][::-1]
    while frames and not is_own(frames[0][0]):
        frames.pop(0)  # Python's own start of the process
    while frames and is_own(frames[0][0]):
        frames.pop(0)
    if not any(is_user_code(f.f_code.co_filename) for f, _ in frames):
        frames += [(f, f.f_lineno) for f in _suspended(awaits)]
    return tuple(_folded(frames))


def _folded(frames: Sequence[tuple[FrameType, int | None]]) -> Iterator[FrameInfo]:
    """Frames as data. Those that a recursion repeats come once, of too many the last ones."""
    points = [(frame.f_code, lineno) for frame, lineno in frames]
    shown: list[tuple[FrameType, int, int, int]] = []
    start = 0
    while start < len(frames):
        cycle, times = _cycle(points, start)
        for at in range(start, start + cycle):
            is_last = times > 1 and at == start + cycle - 1
            frame, lineno = frames[at]
            shown.append((frame, lineno or 0, *((cycle, times - 1) if is_last else (0, 0))))
        start += cycle * times
    for frame, lineno, cycle, again in shown[-_MAX_FRAMES:]:
        code = frame.f_code
        yield FrameInfo(
            filename=_notebook_cells.get(code.co_filename, code.co_filename),
            lineno=lineno,
            name=code.co_name,
            context=_context(code.co_filename, lineno, frame.f_globals),
            cycle=cycle,
            again=again,
        )


def _cycle(points: Sequence[object], start: int) -> tuple[int, int]:
    """How many points from here on come again and again, and how often; 1 and 1 if none do."""
    for length in range(1, _MAX_CYCLE + 1):
        first, times = points[start : start + length], 1
        while points[start + times * length : start + (times + 1) * length] == first:
            times += 1
        if times > _SHOWN_REPEATS:
            return length, times
    return 1, 1


def _suspended(awaits: object) -> Iterator[FrameType]:
    """The frames of a coroutine and of those that it awaits, outermost first."""
    for _ in range(_MAX_FRAMES):
        frame = getattr(awaits, "cr_frame", None) or getattr(awaits, "gi_frame", None)
        if not isinstance(frame, FrameType):
            return
        yield frame
        awaits = getattr(awaits, "cr_await", None) or getattr(awaits, "gi_yieldfrom", None)


def innermost(frames: Sequence[FrameInfo]) -> str:
    """The innermost line of user code, such as ``In[3] line 4``; empty if there is none."""
    for frame in reversed(frames):
        if is_user_code(frame.filename):
            return line_name(frame.filename, frame.lineno)
    return ""


def is_user_code(filename: str) -> bool:
    """Whether a file is neither Python's own, an installed package's nor ours."""
    return not _is_of_library(filename) or filename in _notebook_cells


@lru_cache(4096)
def _is_of_library(filename: str) -> bool:
    """Whether a file is of a library, by its name. Frames are looked at twenty times a second."""
    # Packages may lie in several folders: beside torch, the user's own, those of a parent venv.
    return filename.startswith(_NO_USERS) or any(folder in filename for folder in _INSTALLED)


def short_name(filename: str) -> str:
    """A cell's label, or a file's name without its folder."""
    if is_notebook_file(filename):  # a function of the notebook; its file has a number for a name
        return _notebook_cells.get(filename, "notebook cell")
    return filename if is_cell(filename) else os.path.basename(filename)


def line_name(filename: str, lineno: int) -> str:
    """``In[3] line 4``, or ``train.py line 7``."""
    return CodeLine(short_name(filename), lineno).name


def name_cell(filename: str, cell: str) -> None:
    """Have code of the notebook be named after its cell from here on.

    Args:
        filename: That the code has for a file.
        cell: What the notebook calls the cell, such as ``"In[3]"``.
    """
    _notebook_cells[filename] = cell


def is_own(frame: FrameType) -> bool:
    """Whether a frame belongs to how a rank runs code."""
    return is_own_file(frame.f_code.co_filename)


def is_own_file(filename: str) -> bool:
    """The same, of a file of code."""
    return os.path.dirname(os.path.abspath(filename)) == _OWN


def is_in_collective(filename: str) -> bool:
    """Whether a file is of those that raise what went wrong in a collective."""
    return filename.startswith(os.path.join(_OWN, "collectives", ""))


def _is_of(frame: FrameType, *paths: str) -> bool:
    return frame.f_code.co_filename.startswith(paths)


def _context(
    filename: str, lineno: int, module_globals: dict[str, Any]
) -> tuple[tuple[int, str], ...]:
    numbers = range(max(1, lineno - _CONTEXT), lineno + _CONTEXT + 1)
    lines = [(n, linecache.getline(filename, n, module_globals).rstrip()) for n in numbers]
    while lines and not lines[-1][1] and lines[-1][0] != lineno:
        lines.pop()
    while lines and not lines[0][1] and lines[0][0] != lineno:
        lines.pop(0)
    return tuple(lines) if any(text for _, text in lines) else ()


def forget_frames(error: BaseException) -> None:
    """Let go of the frames of an exception and of those before it, and of what they refer to."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            todo += guarded(partial(_forget, part), lambda _: [])


def _forget(error: BaseException) -> list[BaseException | None]:
    error.__traceback__ = None
    return [error.__cause__, error.__context__]


def pickled(error: BaseException, handled: BaseException | None = None) -> Frames:
    """The exception itself, for the kernel to rebuild; no frames where it cannot be pickled.

    Args:
        error: The exception.
        handled: One that was being handled then; where it can be pickled, too, both are sent.
    """
    both = [error] if handled is None else [error, handled]
    if any(message_of(part).startswith("<its message") for part in both):
        return []  # the kernel would call the same method
    for value in [(error, handled)] * (handled is not None) + [error]:
        if frames := guarded(lambda value=value: _dumped(value), lambda _: [], error):  # type: ignore[misc]
            return frames
    return []


def _dumped(value: object) -> Frames:
    return dump_value(value, what="the exception")
