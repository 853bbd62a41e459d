"""Python's debugger on a rank.

``pdb`` itself, told four things: that it reads from ``RankStdin``, that a cell is a file, where
the user's code begins and ends, and that it ends with the cell. Its prompt is a message to the
kernel, so nothing here waits for a terminal.
"""

from __future__ import annotations

import bdb
import io
import os
import pdb
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, TracebackType
from typing import Any

from distsession.engine import failure
from distsession.engine.collectives.recorder import Recorder
from distsession.engine.listeners import RequestListener, is_run
from distsession.engine.stdin import NoInputError, RankStdin
from distsession.errors import CollectiveError
from distsession.protocol import board as layout
from distsession.protocol.cells import is_cell
from distsession.protocol.messages import CellRequest, Request

__all__ = ["KEEPS_NONE", "Debugger", "DebuggerQuit"]

KEEPS_NONE = (
    "keeps no error: only that of the last cell or call is kept, on the ranks where it was raised, "
    "until the next one begins"
)

_OWN_MODULES = "distsession.engine.*"
"""The debugger steps over these: they are how user code is called, and what it calls in torch."""


_NAMES_OF_PDB = ("__return__", "__exception__", "__pdb_convenience_variables")


_LOOKS_BACK = re.compile(
    r"%(debug|tb|pdb)\b|\b(pm|post_mortem|print_last|last_(exc|value|type|traceback))\b"
)
"""Code that may look at the error of the run before it."""
_LAST = ("last_exc", "last_value", "last_type", "last_traceback")
"""Where Python and IPython have it, in ``sys``."""


class DebuggerQuit(KeyboardInterrupt):
    """``q`` was typed. No ``except Exception`` of the user's code may keep it from the end."""


class Debugger(RequestListener):
    """The debugger of a rank's main thread. It is open from its first prompt until it lets go.

    Args:
        stdin: Asks for commands.
        recorder: Shows others where the debugger stands.
        stream: What it prints goes there.
        namespace: Of the user, where pdb leaves names of its own.
    """

    def __init__(
        self, stdin: RankStdin, recorder: Recorder, stream: Any, namespace: dict[str, Any]
    ):
        self.stdin = stdin
        self.stream = stream
        self._namespace = namespace
        self._recorder = recorder
        self._pdb: _RankPdb | None = None
        self._failed: BaseException | None = None
        self._is_disabled = False
        self._hook = sys.breakpointhook

    def install(self, on_interrupt: Callable[[int, FrameType | None], None]) -> None:
        """Let ``breakpoint()`` and ``pdb.set_trace()`` open this debugger.

        Args:
            on_interrupt: The handler of SIGINT, which other debuggers may not replace.
        """

        def hook(*args: Any, **kwargs: Any) -> Any:
            wanted = os.environ.get("PYTHONBREAKPOINT") or "pdb.set_trace"
            if wanted != "pdb.set_trace":
                return sys.__breakpointhook__(*args, **kwargs)
            return self.set_trace(sys._getframe(1), **kwargs)

        def set_trace(**kwargs: Any) -> None:
            self.set_trace(sys._getframe(1), **kwargs)

        def post_mortem(t: Any = None) -> None:
            found = t if t is not None else sys.exc_info()[1]
            if isinstance(found, BaseException):
                found = found.__traceback__
            if found is None:
                raise ValueError("there is no traceback to look at.")
            self._open_at(found)

        def pm() -> None:
            if hasattr(sys, "last_traceback"):
                post_mortem(sys.last_traceback)
            else:
                self.stream.write(f"rank {self.stdin.rank} {KEEPS_NONE}.\n")

        def interrupt(_: pdb.Pdb, number: int, frame: FrameType | None) -> None:
            on_interrupt(number, frame)

        self._hook = sys.breakpointhook = hook
        pdb.set_trace = set_trace
        pdb.post_mortem = post_mortem
        pdb.pm = pm
        pdb.Pdb.sigint_handler = interrupt  # type: ignore[method-assign,assignment]

    # --- around each request ----------------------------------------------------------------------

    def begin_request(self, request: Request) -> None:
        self._is_disabled = False
        # What ipyparallel's engine imports between two requests sets a hook of its own (debugpy).
        sys.breakpointhook = self._hook
        if is_run(request) and not _looks_back(request):
            self.forget_error()
        if isinstance(request, CellRequest) and self.stdin.rank in request.debug:
            self._pdb = _RankPdb(self)
            self._pdb.begin()

    def end_code(self, request: Request, error: BaseException | None) -> None:
        """With it end the debugger, its breakpoints and its frames."""
        self._hook = sys.breakpointhook
        if self._pdb is None:
            return
        sys.settrace(None)
        self._pdb.clear_all_breaks()
        self._pdb = None
        self._clean()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back

    def __enter__(self) -> None:
        """User code begins: go on stepping."""
        if self._pdb is not None and self._pdb.is_active:
            sys.settrace(self._pdb.trace_dispatch)

    def __exit__(self, *_: object) -> None:
        """User code has ended, so that nobody steps into what comes after it."""
        if self._pdb is not None:
            sys.settrace(None)

    # --- breakpoint() -----------------------------------------------------------------------------

    def set_trace(self, frame: FrameType, *, header: str | None = None, **_: Any) -> None:
        """Stop in this frame."""
        obstacle = self.stdin.obstacle
        if obstacle and not self._is_disabled:
            place = failure.line_name(frame.f_code.co_filename, frame.f_lineno)
            self.stream.write(f"breakpoint() at {place} is passed over: {obstacle}.\n")
        if obstacle or self._is_disabled:
            return
        if self._pdb is None:
            self._pdb = _RankPdb(self)
        if header is not None:
            self._pdb.message(header)
        self._pdb.stop_in(frame)

    def disable(self) -> None:
        """There is nobody who could answer: pass over what is still to come of this request."""
        self._is_disabled = True

    # --- post mortem ------------------------------------------------------------------------------

    def keep_error(self, error: BaseException) -> bool:
        """Keep what a cell failed with, and so its frames and variables; False if it is no cause.

        What was stopped, or freed from a wait for a rank that failed, is none.
        """
        is_freed = isinstance(error, CollectiveError) and self._recorder.abort is not None
        if is_freed or isinstance(error, (KeyboardInterrupt, bdb.BdbQuit)):
            return False
        if error is not self._failed:
            self.forget_error()
        self._failed = error
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and failure.is_own(trace.tb_frame):
            trace = trace.tb_next
        last = error, error, type(error), trace
        for name, value in zip(_LAST, last, strict=True):  # for %tb, %debug and pdb.pm()
            setattr(sys, name, value)
        return True

    def forget_error(self) -> None:
        """Let go of the error that was kept."""
        if self._failed is not None:
            failure.forget_frames(self._failed)
            self._failed = None
            for name in _LAST:
                vars(sys).pop(name, None)

    def post_mortem(self) -> str:
        """Open the debugger where the error was raised; gives why that cannot be."""
        error = self._failed
        if error is None or error.__traceback__ is None:
            return KEEPS_NONE
        last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1:]
        self.stream.write("".join(f"{line}\n" for line in last))
        self._open_at(error.__traceback__)
        return ""

    def _open_at(self, trace: TracebackType) -> None:
        if obstacle := self.stdin.obstacle:
            raise NoInputError(f"{obstacle}.")
        debugger = _RankPdb(self)
        debugger.reset()
        try:
            debugger.interaction(None, trace)
        finally:
            self._clean()

    def _clean(self) -> None:
        self._set_open(False)
        for name in _NAMES_OF_PDB:
            self._namespace.pop(name, None)

    # --- for the debugger -------------------------------------------------------------------------

    @contextmanager
    def opened(self, at: FrameType, lineno: int) -> Iterator[None]:
        """Its prompts stand here meanwhile."""
        before, self.stdin.place = self.stdin.place, self._recorder.place_of(at, lineno)
        self._set_open(True)
        try:
            yield
        finally:
            self.stdin.place = before

    def _set_open(self, is_open: bool) -> None:
        self._recorder.words[self._recorder.region.start + layout.IN_DEBUGGER] = is_open

    def on_continue(self) -> None:
        """It lets the code run."""
        self._set_open(False)


class _RankPdb(pdb.Pdb):
    def __init__(self, debugger: Debugger):
        super().__init__(completekey=None, skip=[_OWN_MODULES], nosigint=True)  # type: ignore[arg-type]
        self.stdout = debugger.stream
        self.stdin = _StdinLines(debugger.stdin)  # type: ignore[assignment]
        self._debugger = debugger
        self._continues = True
        self._quits = False
        self._has_stopped = False

    # --- from where to where ----------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether it wants to see what runs: it steps, or has breakpoints."""
        return not self._continues or bool(self.breaks)

    def begin(self) -> None:
        """Stop at the first line that runs."""
        self._continues, self._has_stopped = False, True
        self.reset()

    def stop_in(self, frame: FrameType) -> None:
        """Stop in this frame, which has called ``breakpoint()``."""
        self._continues = self._has_stopped = False
        self.set_trace(frame)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[Any, int]:
        """The frames of the user's code, without those by which we called it."""
        stack, at = super().get_stack(f, t)
        own = [failure.is_own(frame) for frame, _ in stack]
        start = own.index(True) if True in own[:at] else 0  # before it, the start of the process
        while start < at and own[start]:
            start += 1
        # What a collective has raised is looked at where it was called; ``d`` goes deeper.
        if t is not None and failure.is_in_collective(stack[-1][0].f_code.co_filename):
            names = [frame.f_code.co_filename for frame, _ in stack]
            at = max((i for i, name in enumerate(names) if failure.is_user_code(name)), default=at)
        return stack[start:], at - start

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """A cell's own frame is no function that has been called."""
        if not _is_cell(frame.f_code):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """A cell's last expression runs after the rest of it, in a frame of its own."""
        if not (_is_cell(frame.f_code) and self._has_stopped):
            super().user_return(frame, return_value)

    def canonic(self, filename: str) -> str:
        """The name of a cell is no path."""
        return filename if is_cell(filename) else super().canonic(filename)

    # --- the prompt -------------------------------------------------------------------------------

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Take commands until one lets the code go on."""
        self._has_stopped = True
        self._continues = frame is None
        at, lineno = _end_of(frame, traceback)
        try:
            with self._debugger.opened(at, lineno):
                super().interaction(frame, traceback)
        finally:
            if self._continues or self._quits:
                self._debugger.on_continue()
        if self._quits and frame is not None:
            raise DebuggerQuit("q was typed in the debugger.")

    def _cmdloop(self) -> None:
        """Without pdb's own handling of KeyboardInterrupt: here it is Stop, which ends the cell."""
        self.cmdloop()

    def set_continue(self) -> None:
        self._continues = True
        super().set_continue()

    def set_quit(self) -> None:
        self._quits = True
        super().set_quit()

    def do_EOF(self, arg: str) -> bool | None:
        """The end of the input, or nobody there."""
        why = self._debugger.stdin.refusal
        if why:
            self.message(f"The debugger is passed over: {why}")
            self._debugger.disable()
            return self.do_continue("")
        return super().do_EOF(arg)


class _StdinLines(io.TextIOBase):
    """What a debugger within the debugger (its command ``debug``) reads from."""

    def __init__(self, stdin: RankStdin):
        self._stdin = stdin

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]
        try:
            return f"{self._stdin.read_line('')}\n"
        except EOFError:
            return ""


def _looks_back(request: Request) -> bool:
    """Whether it may want the error of the run before it."""
    return isinstance(request, CellRequest) and (
        request.expression or _LOOKS_BACK.search(request.source) is not None
    )


def _is_cell(code: CodeType) -> bool:
    return code.co_name == "<module>" and is_cell(code.co_filename)


def _end_of(frame: FrameType | None, trace: TracebackType | None) -> tuple[FrameType, int]:
    """Where a debugger opens: in the frame, or at the end of a traceback."""
    if frame is not None:
        return frame, 0
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame, trace.tb_lineno
