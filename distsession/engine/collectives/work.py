"""Handles of operations that have been issued and not yet waited for."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distsession.engine.collectives import torch_private
from distsession.engine.collectives.operation_log import (
    FAILED,
    FLAGS,
    IS_ASYNC,
    IS_FUTURE,
    begin_wait,
    end,
)
from distsession.engine.collectives.operations import describe
from distsession.engine.collectives.recorder import Recorder, Stream
from distsession.engine.torch_errors import CLOSED, in_torchs_place, is_wait_over
from distsession.errors import CollectiveError
from distsession.protocol import board as layout
from distsession.protocol.operation_names import AnySource

__all__ = ["AnySourceWork", "IssuedWork", "Mark", "await_collective", "device_stream_number"]

NO_TIMEOUT = timedelta(0)
"""torch's default for ``Work.wait``: the group's limit holds."""
WAIT_STEP = timedelta(seconds=0.3)
"""How long a wait within torch lasts before it is seen whether the group has been given up: gloo
(torch 2.13) now and then loses an operation that is under way when its connections are shut."""
NO_LIMIT = timedelta(0)
"""What C++ gives to ``wait`` where its caller has set no limit."""
RECEIVE_FROM_ANY = 14
"""torch's ``OpType::RECVANYSOURCE`` (2.8 to 2.15)."""
FIRST_PAUSE_S = 2e-5
LONGEST_PAUSE_S = 2e-3
"""Seconds between two looks at whether somebody has begun to send."""


class IssuedWork(dist.Work):
    """A handle that marks its rank as waiting while it waits."""

    def __init__(
        self,
        inner: Any,
        stream: Stream,
        at: int,
        key: tuple[Any, ...],
        number: int = 0,
        *,
        is_message: bool = False,
        message_limit: timedelta | None = None,
    ):
        super().__init__()
        self._number = number
        """By which it is known to the account of what is under way."""
        self._is_message = is_message
        self._message_limit = message_limit
        """For how long gloo waits for a message. Its own limit may be that of connecting anew."""
        self._inner = inner
        self._stream = stream
        self._at = at
        self._key = key
        self._posted = stream.posted(at)
        self._epoch = stream.recorder.epoch
        self._entry = stream.open.pop(at, None)  # its slot may be another's before it ends
        if self._entry is not None:
            self._entry[FLAGS] |= IS_ASYNC

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        recorder, entry = self._stream.recorder, self._entry
        if recorder.epoch != self._epoch and not torch_private.has_succeeded(self._inner):
            gone = CollectiveError(
                f"{describe(self._key)} was issued before the process group was connected anew, "
                "and is gone: issue it again."
            )
            raise in_torchs_place(gone, CLOSED)
        at = self._stream.wait_for(self._at, self._posted, self._key)
        recorder.block(at)
        if entry is not None:
            begin_wait(entry, is_over=bool(self._inner.is_completed()))
        try:
            # A message's wait must not end too early.
            has_limit = (args and args != (NO_LIMIT,)) or kwargs
            if self._message_limit is not None and not has_limit:
                ended = bool(self._inner.wait(self._message_limit))
            elif has_limit or self._is_message:
                ended = bool(self._inner.wait(*args, **kwargs))
            else:
                ended = await_collective(self._inner, recorder)
            if ended:
                recorder.connections.settle(self._number)
            return ended
        except RuntimeError as error:
            if entry is not None:
                entry[FLAGS] |= FAILED
            explained = recorder.explain(error)  # as long as it can be seen what broke off
            if self._inner.is_completed():  # otherwise only the wait has ended
                self._stream.fail_posted(self._at, self._posted)
            try:
                raise explained from None
            finally:
                del explained  # its traceback has this frame, and that the group's connections
        finally:
            recorder.block(0)
            self._stream.end_posted(at, self._posted)
            self._end()

    def _end(self) -> None:
        self._stream.end_posted(self._at, self._posted)
        if self._entry is not None:
            end(self._entry)

    def is_completed(self) -> bool:
        done = bool(self._inner.is_completed())
        if done:
            self._end()
        return done

    def get_future(self) -> Any:
        future, entry = self._inner.get_future(), self._entry
        if entry is not None:  # C++ waits for the future, as in a backward, and does not say when
            entry[FLAGS] |= IS_FUTURE
        stream, at, posted = self._stream, self._at, self._posted

        def note_end(done: Any) -> None:
            if entry is not None:
                end(entry)
            if not torch_private.has_value(done):
                stream.fail_posted(at, posted)

        future.add_done_callback(note_end)
        return future

    def get_future_result(self) -> Any:
        return self._inner.get_future_result()

    def result(self) -> Any:
        return self._inner.result()

    def synchronize(self) -> Any:
        return self._inner.synchronize()

    def exception(self) -> Any:
        return self._inner.exception()

    def is_success(self) -> Any:
        return self._inner.is_success()

    def boxed(self) -> Any:
        return self._inner.boxed()  # this object may be gone when that is waited for

    def source_rank(self) -> int:
        return int(self._inner.source_rank())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def _get_op_type(self) -> int:
        return int(self._inner._get_op_type())

    def _get_duration(self) -> float:
        return float(self._inner._get_duration())

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = self._inner.timeout  # since torch 2.15
        return limit

    def _get_sequence_number(self) -> int:
        return int(self._inner._get_sequence_number())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def device_stream_number(device: torch.device) -> int:
    """A number that stands for the device's current stream; 0 where it has none."""
    if not _has_streams(device):
        return 0
    try:
        return _number(torch_private.current_stream(device))
    except (RuntimeError, ValueError, AttributeError):
        return 0


def _has_streams(device: torch.device) -> bool:
    """Whether work is given to it; a backend of the user's own may do its work on the CPU.

    A torch with CUDA has a stream for it even so, and says that it is of another device.
    """
    return device.type not in ("cpu", "meta")


def _number(stream: torch.Stream) -> int:
    return ((stream.stream_id << 8 | stream.device_index & 0xFF) + 1) & layout.STREAM_NUMBER_MASK


class Mark:
    """Stands for the handle of an operation that a backend gives none of, since nobody waits.

    NCCL does so for what is not asynchronous: it is given to the current stream, in which whatever
    comes next waits for it anyhow.
    """

    __slots__ = ("_event", "device_stream")

    def __init__(self, event: torch.Event, device_stream: int):
        self._event = event
        self.device_stream = device_stream
        """A number that stands for the stream."""

    @classmethod
    def behind(cls, device: torch.device) -> Mark | None:
        """A mark behind what the device's current stream was given; None where it has no events."""
        if not _has_streams(device):
            return None
        try:
            event = torch.Event(device)
            # Of that device: in a thread of the user's another one may be the current.
            stream = torch_private.current_stream(device)
            event.record(stream)
        except (NotImplementedError, AttributeError):
            return None
        return cls(event, _number(stream))

    def is_completed(self) -> bool:
        return bool(self._event.query())


def await_collective(
    work: Any, recorder: Recorder, stream: Stream | None = None, at: int = 0
) -> bool:
    """Wait for a collective, for as long as its group is not given up.

    Args:
        work: Its handle.
        recorder: Knows whether the group was given up.
        stream: Where it is posted, if its slot is still its own.
        at: Where in the stream.
    """
    epoch = recorder.epoch
    while True:
        was_aborted = recorder.abort is not None
        try:
            return bool(work.wait(WAIT_STEP))
        except RuntimeError as error:
            if not is_wait_over(error):
                raise
            if recorder.epoch != epoch:  # in a thread that nobody waited for
                gone = "the process group was connected anew, and this operation is gone."
                raise in_torchs_place(CollectiveError(gone), CLOSED) from None
            if was_aborted:
                raise recorder.abort_error() from None
            if stream is not None:  # not before, for most are over by now
                stream.accepted(at)


class _Receiver(Protocol):
    """What is needed of a group."""

    def sender(self, tag: int) -> int: ...
    def recv(self, tensors: Any, source: int, tag: int) -> Any: ...
    def recorded(self, key: tuple[Any, ...], *, from_any: bool) -> Any: ...
    def check_time(self, began: float, limit: timedelta | None) -> None: ...
    def check_usable(self) -> None: ...


class AnySourceWork(dist.Work):
    """Receive from whoever sends first.

    Waiting for it within gloo cannot be ended by anything, so the sender is awaited on the board
    and the message then received from that rank.
    """

    def __init__(self, group: _Receiver, tensors: list[torch.Tensor], tag: int):
        super().__init__()
        self._group = group
        self._tensors = tensors
        self._tag = tag
        self._source = -1
        self._work: Any = None
        self._profiled = torch_private.ProfiledReceive(tensors)

    def _find(self) -> bool:
        if self._work is None:
            self._source = self._group.sender(self._tag)
            if self._source >= 0:
                with self._profiled.instead():
                    self._work = self._group.recv(self._tensors, self._source, self._tag)
        return self._work is not None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        limit = timeout if timeout != NO_TIMEOUT else None
        with self._group.recorded(("recv", AnySource(self._tag)), from_any=True):
            began, pause = time.monotonic(), FIRST_PAUSE_S
            while not self._find():
                self._group.check_usable()
                self._group.check_time(began, limit)
                time.sleep(pause)
                pause = min(LONGEST_PAUSE_S, pause * 1.2)
        try:
            return bool(self._work.wait() if limit is None else self._work.wait(limit))
        finally:
            self._profiled.end()

    def is_completed(self) -> bool:
        done = self._find() and bool(self._work.is_completed())
        if done:
            self._profiled.end()
        return done

    def _get_op_type(self) -> int:
        return RECEIVE_FROM_ANY

    def boxed(self) -> Any:
        return torch_private.boxed(self.wait, super().boxed)

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
