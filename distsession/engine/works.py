"""Handles of operations that have been issued and not yet waited for.

Runs in: an engine.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distsession.engine.recorder import Stream

__all__ = ["AnySource", "IssuedWork"]

FIRST_PAUSE = 2e-5
LONGEST_PAUSE = 2e-3
"""Seconds between two looks at whether somebody has begun to send."""


class IssuedWork(dist.Work):
    """A handle that marks its rank as waiting while it waits."""

    def __init__(self, inner: Any, stream: Stream, at: int):
        super().__init__()
        self._inner = inner
        self._stream = stream
        self._at = at

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        recorder = self._stream.recorder
        recorder.block(self._at)
        try:
            return bool(self._inner.wait(*args, **kwargs))
        except RuntimeError as error:
            raise recorder.explain(error) from None
        finally:
            recorder.block(0)
            self._stream.end(self._at)

    def is_completed(self) -> bool:
        done = bool(self._inner.is_completed())
        if done:
            self._stream.end(self._at)
        return done

    def get_future(self) -> Any:
        return self._inner.get_future()

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

    def source_rank(self) -> int:
        return int(self._inner.source_rank())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Receiver(Protocol):
    """What is needed of a group."""

    def sender(self, tag: int) -> int: ...
    def recv(self, tensors: Any, source: int, tag: int) -> Any: ...
    def recorded(self, key: tuple[Any, ...], *, alone: bool) -> Any: ...
    def check_alive(self) -> None: ...


class AnySource(dist.Work):
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

    def _find(self) -> bool:
        if self._work is None:
            self._source = self._group.sender(self._tag)
            if self._source >= 0:
                self._work = self._group.recv(self._tensors, self._source, self._tag)
        return self._work is not None

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        with self._group.recorded(("recv", "any source"), alone=True):
            pause = FIRST_PAUSE
            while not self._find():
                self._group.check_alive()
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, pause * 1.2)
        return bool(self._work.wait(*args, **kwargs))

    def is_completed(self) -> bool:
        return self._find() and bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
