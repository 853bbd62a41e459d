"""Recording what groups of torch's own do, by the hooks that torch has for that.

With ``groups="torch"``, and where a torch that nobody has tried makes groups in another way, code
gets torch's own groups. Since torch 2.15 each of them calls a function before an operation is
issued and another one after it, also for what C++ issues. They feed the recorder, as ``group`` does
for groups of ours: a rank that comes alone to a collective waits in the first of them, and one that
does not match is refused there, before anything begins.

What the hooks are not told cannot be compared: reduce ops, sizes of parts, and tags. Messages with
different tags may be received in another order than they were sent. So a message is written down
for its rank alone, and no deadlock is certain because of it.
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distsession.engine.collectives import torch_private
from distsession.engine.collectives.operations import Elements
from distsession.engine.collectives.recorder import Recorder, Stream
from distsession.engine.collectives.work import Mark, await_collective
from distsession.engine.listeners import RequestListener
from distsession.errors import CollectiveMismatchError
from distsession.protocol import board as layout
from distsession.protocol.messages import Request
from distsession.protocol.operation_names import WORLD, Pair, SplitSizes
from distsession.ranks import format_ranks

__all__ = ["HookedGroups"]

HOOK = 0x64697374
"""By which our hooks are known beside those of others."""

_NAMES = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather_into_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter_tensor",
    "SPLIT": "split_group",
    "UNKNOWN": "an operation",
}
"""torch's functions, by torch's names of operations, where these differ in more than their case."""
_MESSAGES = {"SEND": "to", "RECV": "from"}
_RECEIVERS = frozenset(
    {"RECV", "SCATTER", "REDUCE_SCATTER", "REDUCE_SCATTER_BASE", "REDUCE_SCATTER_TENSOR_COALESCED"}
)
"""These are described by their output, which has one size on all members."""
_OF_PARTS = frozenset({"ALLTOALL", "ALLTOALL_BASE", "ALLGATHER"})
"""Those in which members may have tensors of different shapes, on backends that allow that."""


@dataclass(slots=True)
class _Open:
    """An operation between its two hooks."""

    number: int
    stream: Stream
    at: int
    tensor: torch.Tensor | None
    is_waited_for: bool
    """By its caller, at once, on the CPU: so it is waited for here, where that can be ended."""
    is_on_cpu: bool


class HookedGroups(RequestListener):
    """All groups that torch makes in this process.

    Args:
        recorder: Writes down what they do.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.generation = 0
        self.made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        """How many groups of each name, of these members, have been made in this generation."""
        self.open: dict[int, _Open] = {}
        """By the thread that has begun it."""
        torch_private.follow_new_groups(self._follow)
        recorder.unseen.install()

    def begin_generation(self, generation: int) -> None:
        """Groups of earlier generations are not recorded any more: their connections are gone."""
        self.generation = generation
        self.made.clear()
        self.open.clear()

    def end_request(self, request: Request) -> None:
        self.end_refused()

    def _follow(self, group: Any, ranks: Sequence[int]) -> None:
        """Called by torch for each new group that this rank is a member of."""
        key = str(group.group_name), tuple(ranks)
        hooked = _HookedGroup(self, group, ranks, self.made[key])
        self.made[key] += 1
        group.register_pre_hook(HOOK, hooked.before)
        group.register_post_hook(HOOK, hooked.after)

    def end_refused(self) -> None:
        """What this thread has begun and torch has refused since: its second hook did not come."""
        refused = self.open.pop(get_ident(), None)
        if refused is not None:
            refused.stream.withdraw(refused.at)


class _HookedGroup:
    """One of them. torch's group holds it, so it may not hold that."""

    def __init__(self, groups: HookedGroups, group: Any, ranks: Sequence[int], number: int):
        self._groups = groups
        self._recorder = groups.recorder
        self._generation = groups.generation
        self._group = weakref.ref(group)
        self._ranks = list(ranks)
        self._number = number
        self._stream: Stream | None = None
        self._backends: dict[str, str] = {}
        self._limit = 0.0
        self._is_foreign = False
        self._title = ""
        self._met: set[str] = set()
        """Device types that the group has used, so that all members have made its communicator."""
        self._keys: set[int] = set()

    def before(self, told: Any) -> None:
        """An operation is about to be issued; what this raises its caller gets, and it is not."""
        if self._generation == self._groups.generation:
            self._groups.end_refused()
            self._begin(told)

    def _begin(self, told: Any) -> None:
        stream = self._stream or self._first()
        name, recorder = told.name.name, self._recorder
        tensors = told.output_tensors if name in _RECEIVERS else told.input_tensors
        tensor = tensors[0] if tensors else None
        is_on_cpu = self._is_on_cpu(tensor)
        is_message = name in _MESSAGES
        is_waited_for = is_on_cpu and not (told.async_op or is_message)
        if is_message:
            stream = self._pair_stream(name, told.root)
        key = self._key(name, told, tensors)
        at = stream.post(key, layout.WAITING if is_waited_for else layout.ISSUED)
        try:
            if is_waited_for or (not is_message and not is_on_cpu and self._is_first(tensor)):
                stream.meet(at, self._limit)
                if name == "ALLTOALL":
                    stream.compare_sizes(at)
            else:
                stream.compare(at)
        except CollectiveMismatchError:
            stream.refuse(at)
            raise
        except BaseException:
            stream.fail(at)
            raise
        self._groups.open[get_ident()] = _Open(
            told.op_id, stream, at, tensor, is_waited_for, is_on_cpu
        )
        if recorder.abort is not None:
            self._groups.end_refused()
            raise recorder.abort_error()

    def after(self, told: Any) -> None:
        """That operation has been issued."""
        opened = self._groups.open.get(get_ident())
        if opened is None or opened.number != told.op_id:
            return
        del self._groups.open[get_ident()]
        stream, at, work = opened.stream, opened.at, told.work
        if opened.is_waited_for and work is not None:
            self._wait(work, stream, at)
        elif work is not None and opened.is_on_cpu:  # gloo has a time limit by itself
            stream.enqueued(at, work, float("inf"), device_stream=layout.ON_CPU)
        elif work is not None:
            stream.enqueued(at, work, self._limit)
        elif opened.tensor is not None and (mark := Mark.behind(opened.tensor.device)):
            stream.enqueued(at, mark, self._limit, 0, mark.device_stream)
        else:
            stream.end(at)

    def _wait(self, work: Any, stream: Stream, at: int) -> None:
        """Wait for an operation that its caller waits for next."""
        recorder = self._recorder
        recorder.enter(stream, at)
        try:
            await_collective(work, recorder, stream, at)
        except BaseException as error:
            explained = recorder.explain(error)  # as long as it can be seen what broke off
            stream.fail_begun(at)
            recorder.leave(at)
            try:
                raise explained from None
            finally:
                del explained  # its traceback has this frame
        stream.end_call(at)

    # --- what torch has told ----------------------------------------------------------------------

    def _first(self) -> Stream:
        """What can be known only when torch has all of a new group in its tables."""
        group: Any = self._group()
        recorder = self._recorder
        is_world = group is dist.group.WORLD
        here = dist.get_rank(), dist.get_world_size()
        self._is_foreign = here != (recorder.rank, len(recorder.board.regions))
        if self._is_foreign:
            self._title = "own group" if is_world else f"own group {group.group_name}"
        elif is_world:
            self._title = WORLD
        else:
            self._title = f"group {group.group_name} (ranks {format_ranks(self._ranks)})"
        self._backends = torch_private.Recipe(str(dist.get_backend_config(group))).backends
        self._limit = torch_private.time_limit(group)
        ends = weakref.finalize(self, recorder.drop_streams, recorder.epoch, self._keys)
        ends.atexit = False
        self._stream = self._find_stream(self._title, self._ranks)
        return self._stream

    def _find_stream(self, name: str, members: Sequence[int]) -> Stream:
        if self._is_foreign:
            members = (self._recorder.rank,)
        stream = self._recorder.stream((self._generation, self._number), name, members)
        stream.is_gloo = set(self._backends.values()) == {"gloo"}
        stream.limit = self._limit
        self._keys.add(stream.key)
        return stream

    def _pair_stream(self, name: str, peer: int) -> Stream:
        """This rank's messages to another one, or from it; see the module's docstring."""
        me, other = self._recorder.rank, self._member(peer)
        ends = (me, other) if name == "SEND" else (other, me)
        return self._find_stream(Pair(self._title, *ends).name, (me,))

    def _member(self, rank: int) -> int:
        return self._ranks[rank] if 0 <= rank < len(self._ranks) else rank

    def _is_on_cpu(self, tensor: torch.Tensor | None) -> bool:
        """Whether its operation is done by threads of gloo's, rather than given to a device."""
        if tensor is None:  # a barrier: torch takes the one of the default device
            return all(name == "gloo" for name in self._backends.values())
        return self._backends.get(tensor.device.type, "gloo") == "gloo"

    def _is_first(self, tensor: torch.Tensor | None) -> bool:
        device = "" if tensor is None else tensor.device.type
        is_first = device not in self._met
        self._met.add(device)
        return is_first

    def _key(self, name: str, told: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What the operation is, as far as the hooks are told."""
        start = _NAMES.get(name, name.lower())
        if name in _MESSAGES:
            tensor = tensors[0]
            peer = f"{_MESSAGES[name]} rank {self._member(told.root)}"
            return (start, tensor.dtype, Elements(tensor.numel()), peer)
        if name == "ALLTOALL":
            sent = tuple(each.numel() for each in told.input_tensors)
            received = tuple(each.numel() for each in told.output_tensors)
            return (start, tensors[0].dtype, SplitSizes(sent, received))
        if name in _OF_PARTS and tensors:
            is_single = name == "ALLTOALL_BASE"
            shape = tensors[0].shape[1:] if is_single or not self._is_alike(told) else None
            return (start, tensors[0].dtype, tensors[0].shape if shape is None else shape)
        root = (f"root {self._member(told.root)}",) if told.root >= 0 else ()
        kinds = tensors if name.endswith("COALESCED") else tensors[:1]
        return (start, *(part for each in kinds for part in (each.dtype, each.shape)), *root)

    def _is_alike(self, told: Any) -> bool:
        """Whether all members have a tensor of one shape."""
        return len({each.shape for each in told.output_tensors}) < 2
