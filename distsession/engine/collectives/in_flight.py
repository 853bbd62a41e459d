"""Operations that a device has been given and has not been seen to complete.

A backend such as NCCL's puts an operation into the queue of a device and returns; whoever needs the
outcome waits for the device. So nobody says when an operation is over. Its handle does, when it is
asked: the oldest one whenever another operation is issued, which keeps this short, and all of them
when the kernel wants to know what a rank waits for.
"""

from __future__ import annotations

import ast
import dis
import linecache
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from distsession.engine.collectives.operation_log import Entry, end
from distsession.protocol import board as layout

__all__ = ["InFlight", "instruction", "is_device_wait"]

SECOND_LOOK_S = 0.02
"""Seconds between two looks at whether the main thread is still at the same instruction."""
CHECKED_AT_ONCE = 2
"""How many handles are asked whenever another operation is issued."""


class _Enqueued(NamedTuple):
    """An operation, where it is posted."""

    work: Any
    words: memoryview
    at: int
    posted: int
    entry: Entry | None


class InFlight:
    """What one rank has given to its device, oldest first."""

    def __init__(self) -> None:
        self._operations: deque[_Enqueued] = deque()
        self._lock = threading.Lock()
        """Held while handles and events are asked."""
        self._captures = 0

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, work: Any, words: memoryview, at: int, posted: int, entry: Entry | None) -> None:
        """An operation has been issued.

        Args:
            work: Its handle.
            words: Those of its stream.
            at: Which of them it is posted at.
            posted: Its sequence word there: its room may be another's before it ends.
            entry: Of the log, if one is kept.
        """
        words[at + layout.STATE] = layout.ENQUEUED
        self._operations.append(_Enqueued(work, words, at, posted, entry))
        if len(self._operations) > 1:
            self.note_completed(CHECKED_AT_ONCE)

    def note_completed(self, most: int = 0) -> None:
        """From any thread: take out those that are complete.

        Args:
            most: How many may be asked; 0 for all.
        """
        self.ask(lambda: self._drop_completed(most))

    def _drop_completed(self, most: int) -> None:
        operations = self._operations
        left = []
        count = min(most, len(operations)) if most else len(operations)
        for _ in range(count):
            operation = operations.popleft()
            if not self._note(operation):
                left.append(operation)
                if most:
                    break
        operations.extendleft(reversed(left))

    def ask(self, question: Callable[[], None]) -> bool:
        """Ask the device something, unless another thread does; whether that could be done.

        Nothing may be asked while a graph is captured: its capture would end with an error.
        """
        if self._captures or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._captures:
                return False
            question()
            return True
        finally:
            self._lock.release()

    # --- captures of graphs -----------------------------------------------------------------------

    @property
    def is_capturing(self) -> bool:
        """Whether what is issued now is written down for a graph, and not begun."""
        return self._captures > 0

    def begin_capture(self) -> None:
        """A graph is captured from here on; waits until nothing is being asked any more."""
        with self._lock:
            self._captures += 1

    def end_capture(self) -> None:
        """That capture is over, well or not."""
        with self._lock:
            self._captures = max(0, self._captures - 1)

    # --- waiting ----------------------------------------------------------------------------------

    @staticmethod
    def _note(operation: _Enqueued) -> bool:
        try:
            is_over = bool(operation.work.is_completed())
        except RuntimeError:  # it has failed, and nothing of it is under way any more
            is_over = True
        if is_over:
            words, at = operation.words, operation.at
            if words[at] == operation.posted:
                words[at + layout.STATE] = layout.DONE
            if operation.entry is not None:
                end(operation.entry)
        return is_over

    def is_waited_for(
        self,
        innermost: Callable[[], FrameType | None],
        *,
        is_other_under_way: bool = False,
        is_device_used: bool = False,
    ) -> bool:
        """From another thread: whether the main thread waits for the device.

        It has to be found at the same instruction twice: a wait that is soon over is none.

        Args:
            innermost: Gives its innermost frame.
            is_other_under_way: The device may have been given something that is not known here.
            is_device_used: There is one at all. What it was given may then be anything, so the
                thread has to be at what can be nothing but a wait.
        """
        self.note_completed()
        frame = innermost()
        if frame is None:
            return False
        is_known = bool(self._operations) or is_other_under_way
        if not (is_known or is_device_used) or not is_device_wait(frame, is_certain=not is_known):
            return False
        at = frame.f_lasti
        time.sleep(SECOND_LOOK_S)
        self.note_completed()
        if is_known and not (self._operations or is_other_under_way or is_device_used):
            return False
        return innermost() is frame and frame.f_lasti == at

    def clear(self) -> None:
        """The connections have been given up, and what was under way with them."""
        self._operations.clear()


# --- whether a thread waits for the device --------------------------------------------------------

_WAITS = frozenset(
    {"item", "tolist", "cpu", "numpy", "to", "wait", "float", "int", "bool", "nonzero"}
    | {"is_nonzero", "equal", "allclose", "copy_", "result", "barrier", "print", "repr", "str"}
    | {"replay", "if", "compare"}
)
"""Functions and methods that need the outcome of what a device computes, or room in its queue."""
_CERTAIN_WAITS = frozenset({"item", "cpu", "tolist", "float", "int", "bool", "is_nonzero", "if"})
"""Those of them that do little else, also with a tensor that is on no device."""


def is_device_wait(frame: FrameType | None, *, is_certain: bool = False) -> bool:
    """Whether the line of Python that a thread is at can be nothing but a wait for the device.

    The thread is within C code that has let go of the interpreter's lock. What it has called says
    whether that waits (``loss.item()``) or computes (``a @ b``).

    Args:
        frame: Its innermost one.
        is_certain: It does little but wait.
    """
    # torch's modes of Python, such as that of a default device, stand between the two.
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    if frame is None:
        return False
    called = _called(frame.f_code, frame.f_lasti)
    return called in (_CERTAIN_WAITS if is_certain else _WAITS) or "synchronize" in called.lower()


_OTHER_WAITS = frozenset(
    {"sleep", "input", "select", "poll", "acquire", "join", "recv", "read", "readline", "run"}
)
"""Calls that wait for something else than a device, for as long as it takes."""


def instruction(frame: FrameType | None) -> int:
    """A number that stays the same while a thread is at one call; 0 where it waits for others.

    It is 0, too, where Python itself lets go of its lock now and then: at the end of a loop, and
    where a function begins.

    Args:
        frame: The thread's innermost one.
    """
    if frame is None or _called(frame.f_code, frame.f_lasti) in _OTHER_WAITS:
        return 0
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else "RESUME"
    lets_go = "JUMP_BACKWARD" in name or name == "RESUME"
    return 0 if lets_go else hash((id(frame), frame.f_lasti)) or 1


@lru_cache(256)
def _called(code: CodeType, instruction: int) -> str:
    """The name of what an instruction calls; ``"if"`` for a condition, empty for anything else.

    ``"compare"`` is for functions of Python that ask whether a tensor is true.
    """
    name = dis.opname[code.co_code[instruction]] if instruction >= 0 else ""
    # ``if loss > 3:``. At the end of a loop Python lets go of its lock, which is no wait.
    if name.startswith(("POP_JUMP", "TO_BOOL", "UNARY_NOT")) and "BACKWARD" not in name:
        return "if"
    if "CALL" not in name:
        return ""
    source = _source(code, instruction)
    try:
        called = ast.parse(source, mode="eval").body
    except SyntaxError:
        return ""
    if not isinstance(called, ast.Call):
        return ""
    function = called.func
    if isinstance(function, ast.Name) and function.id in ("max", "min", "sorted", "any", "all"):
        return "compare"
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def _source(code: CodeType, instruction: int) -> str:
    """The expression of an instruction, on one line."""
    positions = list(code.co_positions())
    line, last, begin, stop = positions[instruction // 2]
    if line is None or last is None or begin is None or stop is None:
        return ""
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : last]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][begin:]
    return b" ".join(text.strip() for text in lines).decode("utf-8", "replace")
