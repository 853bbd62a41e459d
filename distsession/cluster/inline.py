"""One rank within the kernel's own process, for debugging.

Calls run in the caller's thread, so ``breakpoint()`` and a debugger work; they are pickled and
unpickled all the same, so that what works here also works on ranks of their own. Output is not
captured: it is the kernel's own. Of the session's options, ``start_timeout``, ``check`` and
``hang_grace`` have nothing to do here: a world of one rank waits for no other.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distsession.cluster.base import Channel, Launcher, Payload
from distsession.cluster.interrupts import InterruptHold
from distsession.cluster.pending import PendingRequest
from distsession.errors import EngineDiedError, OptionsError, SessionStateError
from distsession.options import SessionOptions
from distsession.protocol import shared_memory
from distsession.protocol.agent_messages import UsageReply
from distsession.protocol.messages import CompletionReply, Request
from distsession.protocol.serialize import Frames
from distsession.ranks import RankInfo

if TYPE_CHECKING:
    from distsession.engine.inline import InlineRank  # torch

__all__ = ["InlineLauncher"]


class InlineChannel(Channel):
    """Runs each request at once, in the thread that makes it."""

    runs_in_caller = True

    def __init__(self, rank: InlineRank):
        self._numbers = itertools.count(1)
        self._rank = rank

    def submit(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        progress: shared_memory.Progress | None = None,
        interrupts: InterruptHold | None = None,
    ) -> PendingRequest:
        request = make(next(self._numbers))
        pending = PendingRequest(request.id, ranks)
        pending.put_reply(*self._rank.handle(request, _frames(payload)))
        return pending

    def pending(self) -> list[PendingRequest]:
        return []

    def forget(self, pending: PendingRequest) -> None:
        pass


def _frames(payload: Payload) -> Frames:
    """The frames for rank 0."""
    if isinstance(payload, shared_memory.Segment):
        return shared_memory.map_shared(payload.descriptor, payload.sizes)
    return payload[0]() if isinstance(payload, Mapping) else payload


class InlineLauncher(Launcher):
    """A world of one rank, on the CPU, without any new process."""

    name = "inline"
    channel: InlineChannel

    def __init__(self, options: SessionOptions):
        backend = (options.backend or "gloo").replace(" ", "").lower()
        if backend not in ("gloo", "cpu:gloo") or options.devices:
            raise OptionsError(
                "launcher='inline' runs on the CPU with gloo: leave out backend= and devices=, "
                "or use launcher='local'."
            )
        self._options = options
        self._rank: InlineRank | None = None

    def start(self) -> tuple[RankInfo, ...]:
        from distsession.engine.inline import InlineRank

        self._rank = InlineRank(self._options)
        self.channel = InlineChannel(self._rank)
        self._infos = (self._rank.info,)
        return self._infos

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        return self._infos

    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        self.close()
        return self.start()

    def check_preload(self, names: Sequence[str]) -> tuple[str, ...]:
        from distsession.engine.inline import import_modules

        known = tuple(name for name in names if name in sys.modules)
        if problem := import_modules(names):
            raise OptionsError(f"{problem}.", remedy="An import in a cell shows where that is.")
        return known

    def preload(self, options: SessionOptions) -> None:
        self._options = options

    def close(self) -> None:
        if self._rank is not None:
            rank, self._rank = self._rank, None
            rank.close()

    @property
    def is_alive(self) -> bool:
        return self._rank is not None

    def dead_ranks(self) -> dict[int, EngineDiedError]:
        return {}

    def complete(
        self, ranks: Sequence[int], code: str, inspect: bool, timeout: float
    ) -> dict[int, CompletionReply]:
        rank = self._rank
        return {} if rank is None else {number: rank.complete(code, inspect) for number in ranks}

    def usage(self, timeout: float) -> UsageReply | None:
        return None if self._rank is None else self._rank.usage()

    def client(self, timeout: float) -> Any:
        raise SessionStateError(
            "an inline session has no ipyparallel engines: use launcher='local'."
        )
