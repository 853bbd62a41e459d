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
from functools import lru_cache
from types import FrameType
from typing import Any, TypeVar

import torch

from distsession.engine.cause import has_reason
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
_notebook_cells: dict[str, str] = {}
"""By what their code has for a file: what the notebook calls those of its cells that are known."""


def describe(error: BaseException, depth: int = 0) -> ErrorInfo:
    """Everything about an exception that a person wants to see, as plain data.

    Never raises, whatever the exception's own methods do.
    """
    cause, explicit = before(error)
    nothing: tuple[str, ...] = ()
    notes = _safely(lambda: tuple(str(note) for note in getattr(error, "__notes__", ())), nothing)
    evalue = message_of(error)
    if isinstance(error, BaseExceptionGroup) and depth < _MAX_CHAIN:
        inner = [describe(part, depth + 1) for part in error.exceptions[:10]]
        notes += tuple(
            f"contains {part.ename}{f' at {at}' if (at := innermost(part.frames)) else ''}: "
            f"{part.evalue}"
            for part in inner
        )
    return ErrorInfo(
        ename=type(error).__name__,
        evalue=evalue,
        frames=tuple(_frames(error)),
        notes=notes,
        cause=describe(cause, depth + 1) if cause is not None and depth < _MAX_CHAIN else None,
        cause_is_explicit=explicit,
        syntax=_safely(lambda: _syntax(error), None),
    )


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
        return _safely(lambda: str(error.msg)[:_MAX_VALUE], "invalid syntax")
    if isinstance(error, CollectiveError):  # what torch says is for code that looks for it
        return error.own_text[:_MAX_VALUE]
    return _safely(
        lambda: str(error)[:_MAX_VALUE],
        f"<its message cannot be shown: {type(error).__name__}.__str__ raises>",
    )


def _syntax(error: BaseException) -> FrameInfo | None:
    """Where the code is that could not be read; None for any other error."""
    if not isinstance(error, SyntaxError) or error.lineno is None:
        return None
    # Python's own formatting: the place, the line, the marks below it, and what the error says.
    lines = traceback.format_exception_only(type(error), error)
    shown = itertools.takewhile(lambda line: line.startswith("    "), lines[1:])
    context = tuple((error.lineno, line.rstrip("\n")) for line in shown)
    filename = error.filename or "<string>"
    return FrameInfo(_notebook_cells.get(filename, filename), error.lineno, "<module>", context)


def _safely(make: Callable[[], T], fallback: T) -> T:
    try:
        return make()
    except Exception:
        return fallback


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
    frames = [(f, lineno) for f, lineno in traceback.walk_stack(frame)][::-1]
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
            part.__traceback__ = None
            todo += [part.__cause__, part.__context__]


def pickled(error: BaseException, handled: BaseException | None = None) -> Frames:
    """The exception itself, for the kernel to rebuild; no frames where it cannot be pickled.

    Args:
        error: The exception.
        handled: One that was being handled then; where it can be pickled, too, both are sent.
    """
    for value in [(error, handled)] * (handled is not None) + [error]:
        with contextlib.suppress(Exception):
            return dump_value(value, what="the exception")
    return []
