"""One rank within the kernel's own process, for debugging.

Calls run in the caller's thread, so ``breakpoint()`` and a debugger work; they are pickled and
unpickled all the same, so that what works here also works on ranks of their own. Output is not
captured: it is the kernel's own. Of the session's options, ``start_timeout``, ``check`` and
``hang_grace`` have nothing to do here: a world of one rank waits for no other.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from distsession.cluster.base import Channel, Launcher, Payload
from distsession.cluster.pending import PendingRequest
from distsession.errors import (
    EngineDiedError,
    LaunchError,
    OptionsError,
    SerializationError,
    SessionStateError,
)
from distsession.options import SessionOptions
from distsession.protocol import serialize, shared_memory
from distsession.protocol.messages import (
    CallRequest,
    CellRequest,
    CommitRequest,
    CompletionReply,
    CompletionRequest,
    FillRequest,
    PullRequest,
    PushRequest,
    Reply,
    Request,
    ShardsRequest,
    SummaryRequest,
    TimelineRequest,
    UsageReply,
    UsageRequest,
)
from distsession.protocol.serialize import Frames
from distsession.ranks import RankInfo

__all__ = ["InlineLauncher"]


class InlineChannel(Channel):
    """Runs each request at once, in the thread that makes it."""

    runs_in_caller = True

    def __init__(self, namespace: dict[str, Any]):
        from distsession.engine.timeline import Trace
        from distsession.engine.transfer import Transfers

        self._numbers = itertools.count(1)
        self.namespace = namespace
        self._transfers = Transfers(namespace, 0)
        self._trace = Trace(0, None)

    def submit(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        progress: shared_memory.Progress | None = None,
    ) -> PendingRequest:
        from distsession.engine import failure
        from distsession.engine.execute import NOTHING

        request = make(next(self._numbers))
        pending = PendingRequest(request.id, ranks)
        began = time.perf_counter()
        info = shown = None
        answer: Frames = []
        self._trace.begin(request)
        try:
            with _breakpoints_open_pdb():
                value, shown = self._perform(request, _frames(payload))
            self._trace.end(request)
            if value is not NOTHING:
                packed = time.monotonic_ns()
                answer = _copies(serialize.dump_value(value, what="the result of rank 0"))
                self._trace.moved(request, shared_memory.nbytes(answer), packed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._trace.end(request, error)
            info, answer = failure.describe(error), failure.pickled(error)
        duration = time.perf_counter() - began
        pending.put_reply(Reply(request.id, 0, duration, info, shown), answer)
        return pending

    def _perform(self, request: Request, payload: Frames) -> tuple[Any, Any]:
        from distsession.engine.execute import NOTHING, PlainFront, run_call, run_cell

        value: Any = NOTHING
        match request:
            case CellRequest():
                front = PlainFront()
                with self._trace.around(request):
                    value, show = run_cell(
                        request.source,
                        request.label,
                        self.namespace,
                        front,
                        expression=request.expression,
                    )
                shown = front.render(value) if show and not request.expression else None
                return (value if request.fetch else NOTHING), shown
            case CallRequest():
                try:
                    function, args, kwargs = serialize.load(_copies(payload))
                except Exception as error:
                    raise SerializationError(
                        f"the function or its arguments cannot be rebuilt: {error}"
                    ) from error
                value = run_call(function, args, kwargs, self.namespace)
            case PullRequest():
                value = self._transfers.pull(request.names)
            case PushRequest():
                self._stage(request, payload)
            case CommitRequest():
                self._transfers.assign(request.keep)
            case ShardsRequest():
                value = self._transfers.shards(request.name)
            case FillRequest():
                (whole,) = payload
                began, at = time.monotonic_ns(), request.at.get(0)
                size = self._transfers.fill(request.name, request.shape, at, whole)
                self._trace.moved(request, size, began)
            case SummaryRequest():
                from distsession.engine.diff import Summary

                label, front = f"In[{request.id}]", PlainFront()
                found = run_cell(request.expression, label, self.namespace, front, expression=True)
                value = Summary(found[0]).leaves  # of one rank nothing else is asked
            case TimelineRequest():
                value = self._trace.of(request.run)
        return value, None

    def _stage(self, request: PushRequest, payload: Frames) -> None:
        began = time.monotonic_ns()
        self._transfers.stage(_copies(payload))
        self._trace.moved(request, shared_memory.nbytes(payload), began)

    def pending(self) -> list[PendingRequest]:
        return []

    def forget(self, pending: PendingRequest) -> None:
        pass


@contextlib.contextmanager
def _breakpoints_open_pdb() -> Iterator[None]:
    """The hook of debugpy, which ipykernel imports, does nothing without a visual debugger."""
    debugpy = sys.modules.get("debugpy")
    if debugpy is None or debugpy.is_client_connected():
        yield
        return
    before, sys.breakpointhook = sys.breakpointhook, sys.__breakpointhook__
    try:
        yield
    finally:
        sys.breakpointhook = before


def _frames(payload: Payload) -> Frames:
    """The frames for rank 0."""
    if isinstance(payload, shared_memory.Segment):
        return shared_memory.map_shared(payload.descriptor, payload.sizes)
    return payload[0]() if isinstance(payload, Mapping) else payload


def _copies(frames: Frames) -> Frames:
    """As if they had been sent: what is rebuilt from them shares no memory with the original."""
    return [bytearray(frame) for frame in frames]


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
        self._started = False
        self._threads = 0

    def start(self) -> tuple[RankInfo, ...]:
        import torch
        import torch.distributed as dist

        from distsession.distributed.seeding import seed_everything
        from distsession.engine import process_group

        if dist.is_initialized():
            raise SessionStateError(
                "this process is in a process group already, so it cannot be an inline rank: "
                "call torch.distributed.destroy_process_group() first."
            )
        options = self._options
        _preload(options.preload)
        if options.seed is not None:
            seed_everything(options.seed)
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=None if options.timeout is None else timedelta(seconds=options.timeout),
        )
        self._started = True
        self._threads = torch.get_num_threads()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = torch.device("cpu")
        namespace = {
            "__name__": "__main__",
            "torch": torch,
            "dist": dist,
            "rank": 0,
            "local_rank": 0,
            "world_size": 1,
            "device": device,
        }
        self.channel = InlineChannel(namespace)
        place = process_group.Place(
            0, 0, 1, 1, 0, 1, "gloo", options.timeout, device, 0, f"{os.getpid()}"
        )
        self._infos = (process_group.rank_info(place, 0),)
        return self._infos

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        return self._infos

    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        self.close()
        return self.start()

    def close(self) -> None:
        if self._started:
            self._started = False
            sys.modules["torch"].set_num_threads(self._threads)  # this process was here before
            dist = sys.modules["torch.distributed"]
            if dist.is_initialized():  # the user may have left it
                dist.destroy_process_group()

    @property
    def is_alive(self) -> bool:
        return self._started

    def dead_ranks(self) -> dict[int, EngineDiedError]:
        return {}

    def complete(
        self, ranks: Sequence[int], code: str, inspect: bool, timeout: float
    ) -> dict[int, CompletionReply]:
        from distsession.engine import completion

        question = CompletionRequest(0, code, inspect)
        return {rank: completion.look(question, rank, self.channel.namespace) for rank in ranks}

    def usage(self, timeout: float) -> UsageReply | None:
        from distsession.engine import usage

        return usage.read(UsageRequest(1, {}), {0: os.getpid()})

    def client(self, timeout: float) -> Any:
        raise SessionStateError(
            "an inline session has no ipyparallel engines: use launcher='local'."
        )


def _preload(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise LaunchError(f"the preload module {name!r} does not import: {error!r}") from error
