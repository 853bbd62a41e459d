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
from typing import Any, Protocol

from distsession.engine.collectives.operation_log import BLOCKED, Entry, end
from distsession.engine.frames import outward
from distsession.protocol import board as layout

__all__ = ["Enqueued", "InFlight", "instruction", "is_device_wait"]

SECOND_LOOK_S = 0.02
"""Seconds between two looks at whether the main thread is still at the same instruction."""
CHECKED_AT_ONCE = 2
"""How many handles are asked whenever another operation is issued."""

NOTED_AT_ONCE = 64
"""How many operations a wait is noted of; the first of them is what it is for."""

_STATE, _DONE = layout.STATE, layout.DONE


class OperationStream(Protocol):
    """Where an operation is posted."""

    name: str
    words: memoryview


Enqueued = tuple[Any, OperationStream, int, int, "Entry | None", int, float]
"""An operation: its handle; its stream, where it is posted there, and its sequence word, since its
room may be another's before it ends; its entry in the log, if one is kept; when it began, in
nanoseconds; the seconds that it may take. A plain tuple, for one is made in each operation."""


class InFlight:
    """What one rank has given to its device, oldest first."""

    def __init__(self) -> None:
        self._operations: deque[Enqueued] = deque()
        self._lock = threading.Lock()
        """Held while handles and events are asked."""
        self._oldest: Enqueued | None = None
        """What was the oldest when it was last looked whether somebody waits."""
        self.captures = 0
        """How many graphs are captured just now: what is issued then is written down for one, and
        not begun."""

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def is_on_device(self) -> bool:
        """From any thread: whether a device has some of it, and no threads of a backend all."""
        return any(
            stream.words[at + layout.DEVICE_STREAM] != layout.ON_CPU
            for _, stream, at, *_ in list(self._operations)
        )

    def add(self, operation: Enqueued) -> None:
        """An operation has been issued; see which of the oldest are complete."""
        operations = self._operations
        operations.append(operation)
        lock = self._lock
        if len(operations) == 1 or self.captures or not lock.acquire(False):
            return
        try:
            for _ in range(0 if self.captures else CHECKED_AT_ONCE):
                if len(operations) == 1 or not _note(operations[0]):
                    break
                operations.popleft()
        finally:
            lock.release()

    def note_completed(self) -> None:
        """From any thread: take out those that are complete."""
        if self._operations:
            self.ask(self._drop_completed)

    def _drop_completed(self) -> None:
        operations = self._operations
        left = []
        for _ in range(len(operations)):
            operation = operations.popleft()
            if not _note(operation):
                left.append(operation)
        operations.extendleft(reversed(left))

    def ask(self, question: Callable[[], None]) -> bool:
        """Ask the device something, unless another thread does; whether that could be done.

        Nothing may be asked while a graph is captured: its capture would end with an error.
        """
        lock = self._lock
        if self.captures or not lock.acquire(blocking=False):
            return False
        try:
            if self.captures:
                return False
            question()
            return True
        finally:
            lock.release()

    def note_wait(self, innermost: Callable[[], FrameType | None]) -> None:
        """From another thread, now and then: note in the log whether the main thread waits.

        It waits for what is under way meanwhile. What it has gone on without was not waited for.
        Nothing is asked as long as the device gets on.

        Args:
            innermost: Gives its innermost frame.
        """
        oldest = next(iter(self._operations), None)
        if oldest is None or oldest is not self._oldest:
            self._oldest = oldest
            return
        is_wait, now = is_device_wait(innermost()), time.monotonic_ns()
        self.note_completed()
        for operation in list(self._operations)[:NOTED_AT_ONCE]:
            entry = operation[4]
            if entry is not None:
                entry[BLOCKED] = (entry[BLOCKED] or now) if is_wait else 0

    def overdue(self, since: int, now: int) -> Enqueued | None:
        """From any thread: the first that has been under way for longer than it may.

        Args:
            since: The time, in nanoseconds, before which none of it counts.
            now: The present one.
        """
        is_late = lambda o: now - max(o[5], since) > o[6] * 1e9  # noqa: E731
        if not any(map(is_late, list(self._operations))):
            return None
        self.note_completed()
        return next(filter(is_late, list(self._operations)), None)

    # --- captures of graphs -----------------------------------------------------------------------

    def begin_capture(self) -> None:
        """A graph is captured from here on; waits until nothing is being asked any more."""
        with self._lock:
            self.captures += 1

    def end_capture(self) -> None:
        """That capture is over, well or not."""
        with self._lock:
            self.captures = max(0, self.captures - 1)

    # --- waiting ----------------------------------------------------------------------------------

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
        self._operations = deque()
        self._lock = threading.Lock()  # whoever was interrupted just then may not have released it


def _note(operation: Enqueued) -> bool:
    """Whether an operation is over; then it is marked so."""
    work, stream, at, posted, entry, _, _ = operation
    try:
        if not work.is_completed():
            return False
    except RuntimeError:  # it has failed, and nothing of it is under way any more
        pass
    words = stream.words
    if words[at] == posted:
        words[at + _STATE] = _DONE
    if entry is not None:
        end(entry)
    return True


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
    outside = (each for each in outward(frame) if each.f_code.co_name != "__torch_function__")
    frame = next(outside, None)
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
