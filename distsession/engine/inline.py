"""The one rank of an inline session, within the kernel's own process."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed.seeding import seed_everything
from distsession.engine import completion, failure, process_group, usage
from distsession.engine.execute import NOTHING, PlainFront
from distsession.engine.namespace import rank_names
from distsession.engine.requests import RequestDispatcher
from distsession.engine.timeline import Trace
from distsession.errors import LaunchError, SessionStateError
from distsession.options import SessionOptions
from distsession.protocol import serialize, shared_memory
from distsession.protocol.agent_messages import UsageReply, UsageRequest
from distsession.protocol.messages import CompletionReply, CompletionRequest, Reply, Request
from distsession.protocol.serialize import Frames
from distsession.ranks import RankInfo

__all__ = ["InlineRank", "import_modules"]


class _Copies:
    """As if frames had been sent: what is rebuilt from them shares no memory with the original."""

    def read_private(self, payload: Frames) -> Frames:
        return [bytearray(frame) for frame in payload]

    def map_whole(self, payload: Frames) -> Any:
        (whole,) = payload
        return whole


class InlineRank:
    """A world of one rank, on the CPU.

    Args:
        options: Of the session.

    Raises:
        SessionStateError: This process is in a process group already.
        LaunchError: A preload module does not import.
    """

    def __init__(self, options: SessionOptions):
        if dist.is_initialized():
            raise SessionStateError(
                "this process is in a process group already, so it cannot be an inline rank: "
                "call torch.distributed.destroy_process_group() first."
            )
        if problem := import_modules(options.preload):
            raise LaunchError(problem)
        if options.seed is not None:
            seed_everything(options.seed)
        self._threads_before = torch.get_num_threads()
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=None if options.timeout is None else timedelta(seconds=options.timeout),
        )
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = torch.device("cpu")
        place = process_group.Place(
            0, 0, 1, 1, 0, 1, "gloo", options.timeout, device, 0, f"{os.getpid()}"
        )
        self.info: RankInfo = process_group.rank_info(place, 0)
        self._namespace = {"__name__": "__main__", **rank_names(0, 0, 1, device)}
        self._trace = Trace(0, None)
        self._dispatcher = RequestDispatcher(
            0, self._namespace, PlainFront(), self._trace, _Copies()
        )

    def close(self) -> None:
        """Leave the process as it was before."""
        torch.set_num_threads(self._threads_before)
        process_group.leave()  # unless the user has left it

    def handle(self, request: Request, payload: Frames) -> tuple[Reply, Frames]:
        """Perform a request in this thread; gives the answer and the frames that go with it.

        Raises:
            KeyboardInterrupt: The user has stopped it.
        """
        began = time.perf_counter()
        info = shown = None
        answer: Frames = []
        self._trace.begin_request(request)
        try:
            with _breakpoints_open_pdb():
                value, shown = self._dispatcher.perform(request, payload)
            if value is not NOTHING:
                packed = time.monotonic_ns()
                frames = serialize.dump_value(value, what="the result")
                answer = [bytearray(frame) for frame in frames]
                self._trace.moved(request, shared_memory.nbytes(answer), packed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._trace.end_code(request, error)
            info, answer = failure.describe(error), failure.pickled(error)
        duration = time.perf_counter() - began
        return Reply(request.id, 0, duration, info, shown), answer

    def complete(self, code: str, inspect: bool) -> CompletionReply:
        """Complete code, or inspect a name, by what this rank has."""
        return completion.handle_request(CompletionRequest(0, code, inspect), 0, self._namespace)

    def usage(self) -> UsageReply:
        """What this process uses."""
        return usage.read(UsageRequest(1, {}), {0: os.getpid()})


def import_modules(names: Sequence[str]) -> str:
    """Import modules; gives why one does not, or nothing."""
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            return f"the preload module {name!r} does not import: {error!r}"
    return ""


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
