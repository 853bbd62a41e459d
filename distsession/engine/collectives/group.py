"""A process group that outlives its connections.

User code holds groups: in DistributedDataParallel, in meshes, in its own variables. Each is one of
ours, which passes every operation on to an inner group of torch's. When the connections have to be
given up, the inner group is replaced; whoever holds the outer one goes on. Since every operation
passes here, whether it is asked for by Python or by C++ (DistributedDataParallel, functional
collectives), this is also where it is recorded and compared (see ``recorder``).

Backends are of two kinds. gloo does its work on the CPU, and a rank waits for it in a call: nothing
begins before all members have come. The others (NCCL) give it to a device and return: an operation
is posted and compared with what the peers have posted by now, and nobody waits (see ``in_flight``).
Only before the first one of a communicator all members meet, as they do within NCCL as well.

The file is long because a group and the table of all groups are made, connected and replaced
together, and each uses private state of the other.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distsession.engine import cause
from distsession.engine.collectives import torch_private
from distsession.engine.collectives.operations import Collectives
from distsession.engine.collectives.recorder import Recorder, Stream
from distsession.engine.collectives.work import (
    AnySourceWork,
    IssuedWork,
    Mark,
    await_collective,
    device_stream_number,
)
from distsession.engine.failure import is_user_code
from distsession.engine.torch_errors import (
    in_torchs_place,
    key_text,
    late_receive_text,
    monitored_text,
)
from distsession.errors import CollectiveError, CollectiveMismatchError
from distsession.protocol import board as layout
from distsession.protocol.board import key_of
from distsession.protocol.messages import LIMITED_STORE_WAIT, STORE_WAIT, TimedOut
from distsession.protocol.operation_names import WORLD, Pair
from distsession.ranks import format_ranks, ranks_text

__all__ = ["Groups"]

NAMES_PER_GENERATION = 100_000
"""torch names groups by counting them; each generation counts from another number."""


class Groups:
    """All groups of this process.

    Args:
        recorder: Writes down what they do.
        detail: See :func:`~distsession.engine.collectives.torch_private.make_native_group`.
        strict: All members meet before each operation, also of a backend that waits on a device.
        session: Which session this is, so that members of a group can tell who else is of it.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        detail: bool = False,
        strict: bool = False,
        session: str = "",
    ):
        self.recorder = recorder
        self._session = session
        self.strict = strict
        self.generation = 0
        self._detail = detail
        self._meeting: dist.Store | None = None
        self._backends_store: dist.Store | None = None
        """Where members of groups of other backends than gloo meet, whose threads may ask it too:
        it knows nothing of Python."""
        self._connect_timeout: timedelta | None = None
        self._alive: weakref.WeakValueDictionary[str, SwappableGroup] = (
            weakref.WeakValueDictionary()
        )
        self._made: Counter[tuple[str, tuple[int, ...]]] = Counter()
        """How many groups of each name, of these members, have been made in this generation: torch
        gives the name of one that was destroyed to another."""
        self._inherited: list[Any] = []
        self._default: weakref.ref[SwappableGroup] | None = None
        """The session's own group, until it is destroyed."""
        self._named: Counter[tuple[int, ...]] = Counter()
        torch_private.install_group_factory(self._make, self._meet_to_make, self._name_of)
        torch_private.follow_groups(self._on_default, self._on_end)
        recorder.unseen.install()

    def _make(
        self, options: Any, recipe: torch_private.Recipe = torch_private.GLOO
    ) -> SwappableGroup:
        """Called by torch for each new group that this rank is a member of."""
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = str(options.group_id)
        is_world = not options.global_ranks_in_group
        world: Any = None if is_world else dist.group.WORLD
        group = SwappableGroup(
            self, name, ranks, options.group_rank, options.timeout, is_world, recipe
        )
        if isinstance(world, SwappableGroup):
            group.set_members([world.members[rank] for rank in ranks], world.is_foreign)
        if not is_world:
            self._number(group)
            # Here, where one can be told to stop, rather than within gloo.
            with (
                group.stands_in(group.connect_text, dist.DistStoreError),
                group.recorded(("new_group",), meets=True),
            ):
                self._connect_new(group, options.store)
        elif self._meeting is not None:  # the session's
            self._number(group)
            group.connect(self._store_of(group) or options.store)
            self._default = weakref.ref(group)
        else:
            self._connect_own(group, options.store)
            self._number(group)
        self._add(group)
        return group

    def _number(self, group: SwappableGroup) -> None:
        """Of its members and its name, all of which they have made as often by now."""
        key = group.getGroupName(), tuple(group.members)
        group.number = self._made[key]
        self._made[key] += 1

    def _connect_own(self, group: SwappableGroup, store: dist.Store) -> None:
        """Connect a default group of the user's own, and find out which ranks its members are.

        Each member says who it is before it connects, so who is connected to all can read it. Who
        says nothing is no rank of this session, such as a process that a rank has started.
        """
        me, place, size = self.recorder.rank, group.rank(), group.size()
        self.recorder.connections.lose()
        is_told = size > 1 and group.recipe.is_gloo and not torch_private.connects_later()
        if is_told:
            store.set(f"distsession/{place}", f"{self._session} {me}")
        group.connect(store)
        members: list[int] | None = [me]
        if is_told:
            members = self._read_members(store, size)
        elif size > 1:  # nobody has waited for the others yet
            is_alike = place == me and size <= len(self.recorder.board.regions)
            members = list(range(size)) if is_alike else None
        group.set_members(members or group.ranks, is_foreign=members is None)

    def _read_members(self, store: dist.Store, size: int) -> list[int] | None:
        """The session's ranks that members of a group have said they are; None if some have not."""
        keys = [f"distsession/{place}" for place in range(size)]
        said = [store.get(key).decode().split() for key in keys] if store.check(keys) else []
        if not said or any(each[0] != self._session for each in said):
            return None
        return [int(rank) for _, rank in said]

    def _connect_new(self, group: SwappableGroup, store: dist.Store) -> None:
        """Connect a group beside others, whose connections stay if this is given up before."""
        connections = self.recorder.connections
        self.recorder.enter()
        try:
            group.connect(self._store_of(group) or store)
        except BaseException:
            connections.lose()
            raise
        finally:
            self.recorder.leave()

    def _add(self, group: SwappableGroup) -> None:
        self._alive[group.getGroupName()] = group
        connections = self.recorder.connections
        if not group.recipe.is_gloo:
            connections.lose()  # what a device was given is not kept account of
        # Its peers may have it still.
        weakref.finalize(group, connections.lose).atexit = False

    def _meet_to_make(
        self,
        ranks: Sequence[int] | None,
        makers: Any = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Called by torch on each rank, a member or not, before a new group is made.

        torch numbers new groups by counting them, so every rank has to make the same ones in the
        same order; where one does not, groups meet that do not belong together.

        Args:
            ranks: The members; None for all.
            makers: The group whose members alone make it. Default: all ranks do.
            timeout: Its time limit. Default: torch's own.
        """
        world: Any = dist.group.WORLD
        if not isinstance(world, SwappableGroup):
            return
        if not isinstance(timeout, timedelta | None):
            return  # which torch refuses
        asked = world.ranks if ranks is None else list(ranks)
        if len(set(asked)) != len(asked) or not set(asked) <= set(world.ranks):
            return  # which torch refuses
        members = [world.members[rank] for rank in asked]
        meeting = makers if isinstance(makers, SwappableGroup) else world
        key = ("new_group", f"ranks {format_ranks(members)}")
        limit = None if timeout is None else timeout.total_seconds()
        with (
            meeting.stands_in(meeting.connect_text, dist.DistStoreError),
            meeting.recorded(key, meets=True, limit=limit),
        ):
            pass

    def _name_of(self, ranks: Sequence[int]) -> str:
        """Called by torch to name a group that its members make alone.

        torch puts into the name in how many groups a rank is, which differs from member to member,
        such as for one that is new. How many groups of these members there were does not.
        """
        members = tuple(ranks)
        self._named[members] += 1
        return f"{key_of(self.generation, self._named[members], *members):016x}"

    def adopt(
        self,
        inner: Any,
        name: str,
        members: Sequence[int],
        timeout: timedelta,
        recipe: torch_private.Recipe,
    ) -> SwappableGroup:
        """A group around one that torch has made out of another."""
        group = SwappableGroup(self, name, members, inner.rank(), timeout, False, recipe)
        self._number(group)
        group.use(inner)
        group.devices = [torch.device(device) for device in recipe.backends]
        self.recorder.connections.lose()
        self._add(group)
        return group

    def _store_of(self, group: SwappableGroup) -> dist.Store | None:
        """Where its members meet while the generation begins, or later; None to ask torch."""
        if group.recipe.is_gloo:
            if self._meeting is None or not group.is_world:
                return None
            return dist.PrefixStore("world", self._meeting)
        if self._backends_store is None:
            return None
        count = self._made[group.getGroupName(), tuple(group.members)]
        name = "world" if group.is_world else f"group{group.getGroupName()}-{count}"
        return dist.PrefixStore(name, self._backends_store)

    def make_native(self, group: SwappableGroup, store: dist.Store) -> Any:
        """The inner group.

        Args:
            group: The outer one.
            store: With a prefix of its own.
        """
        if not group.recipe.is_gloo:
            made = torch_private.make_backend_group(
                group.recipe,
                store,
                group,
                group.ranks,
                group.limit,
                is_world=group.is_world,
            )
            for kind in torch_private.backend_classes(made):
                self.recorder.unseen.watch_backends(kind)
            return made
        joining = self._connect_timeout if self._meeting is not None else None
        return torch_private.make_native_group(
            store,
            group.rank(),
            group.size(),
            group.limit,
            detail=self._detail,
            connect_timeout=joining,
        )

    @contextmanager
    def record_store_wait(self, keys: Sequence[str], is_limited: bool) -> Iterator[None]:
        """Record that the main thread waits for keys of the store, unless it is for a group.

        Args:
            keys: Which; those of the generation begin with its name.
            is_limited: The caller has set a limit, after which it goes on.
        """
        recorder = self.recorder
        if self._meeting is not None or recorder.is_blocked or not recorder.is_main_thread:
            yield
            return
        me, start = recorder.rank, f"generation{self.generation}/"
        stream = recorder.stream((self.generation, -1), Pair(WORLD, me, me).name, (me, me))
        names = ", ".join(repr(key.removeprefix(start)) for key in keys)
        described = f"{'key' if len(keys) == 1 else 'keys'} {names}"
        at = stream.post((LIMITED_STORE_WAIT if is_limited else STORE_WAIT, described))
        recorder.block(at)
        try:
            yield
        finally:
            recorder.block(0)
            stream.end(at)

    def become_child(self) -> None:
        """In a forked process: let no group go, whose threads only the rank has to wait for."""
        self._inherited = [(group, group.inner) for group in list(self._alive.values())]

    # --- groups that code leaves ------------------------------------------------------------------

    def _on_default(self, group: Any) -> None:
        """Called by torch: code has put this group, or None, in the place of the default one."""
        own = None if self._default is None else self._default()
        if own is None or self._meeting is not None:
            return
        if group is own:
            self.recorder.region.forget_left(own.title)
        else:
            self._note_left(own, is_final=False)

    def _on_end(self, name: str) -> None:
        """Called by torch: code has destroyed the group of that name, or all of them."""
        if self._meeting is not None:
            return
        for group in list(self._alive.values()):
            if group.getGroupName() == name or (not name and not group.is_ended):
                group.is_ended = True
                self._note_left(group, is_final=True)
                if self._default is not None and group is self._default():
                    self._default = None

    def _note_left(self, group: SwappableGroup, *, is_final: bool) -> None:
        family = self.generation, group.number
        self.recorder.note_left(group.title, family, is_final=is_final)

    def put_back_default(self) -> None:
        """Let the session's group be the default one again, where code has only put it away."""
        own = None if self._default is None else self._default()
        if own is not None and dist.group.WORLD is not own and torch_private.is_known(own):
            torch_private.put_back_default(own)

    def is_default(self, rank: int, world_size: int) -> bool:
        """Whether the default group has the session's ranks; user code may have made another."""
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            return False
        world: Any = dist.group.WORLD
        if not isinstance(world, SwappableGroup):
            return True
        return world.members == world.ranks and not world.is_foreign

    # --- a new generation -------------------------------------------------------------------------

    def abort(self) -> None:
        """From any thread: free whoever waits for a device, which a lost member would not do."""
        torch_private.abort_backends(
            [group.inner for group in list(self._alive.values()) if not group.recipe.is_gloo]
        )

    @property
    def has_world(self) -> bool:
        """Whether there is a default group that can be connected anew."""
        return dist.is_initialized() and isinstance(dist.group.WORLD, SwappableGroup)

    @property
    def world_recipe(self) -> torch_private.Recipe | None:
        """How the default group was asked for; None without one that can be connected anew."""
        world: Any = dist.group.WORLD
        return world.recipe if self.has_world else None

    def bind_world(self, device: torch.device | None) -> None:
        """Let the default group be bound to this device when it is connected anew, or to none."""
        world: Any = dist.group.WORLD
        world.recipe = replace(world.recipe, device_id=device)
        world.bound_device_id = device

    def prepare(
        self,
        meeting: dist.Store,
        generation: int,
        connect_timeout: float | None = None,
        backends_store: dist.Store | None = None,
    ) -> None:
        """The default group that is made next belongs to this generation.

        Args:
            meeting: The generation's own part of the store, through a client that works.
            generation: Its number.
            connect_timeout: Seconds that connecting a group may take; by default as its operations.
            backends_store: The same part through a client without Python, for other backends than
                gloo.
        """
        self.abort()  # a device would go on waiting: who is told to may not have been reached yet
        self.recorder.connections.begin_making()
        self._begin(generation)
        self._backends_store = backends_store
        self._meeting = meeting  # the recorder has been reset: an abort may have come since
        self._connect_timeout = (
            None if connect_timeout is None else timedelta(seconds=connect_timeout)
        )

    def _begin(self, generation: int) -> None:
        self.generation = generation
        self._made.clear()
        self._named.clear()

    def keep(self, meeting: dist.Store, generation: int) -> None:
        """Begin a generation with the connections that there are; every rank has to do so.

        Args:
            meeting: The generation's own part of the store.
            generation: Its number.
        """
        self._begin(generation)
        torch_private.set_store(dist.group.WORLD, meeting)
        torch_private.set_group_count(generation * NAMES_PER_GENERATION)
        for group in list(self._alive.values()):
            self._carry_over(group)
        torch_private.refresh_modules()

    def reconnect_world(self, meeting: dist.Store) -> None:
        """Connect the default group anew; returns when every rank has."""
        world: Any = dist.group.WORLD
        self._default = weakref.ref(world)
        self._carry_over(world)
        world.connect(self._store_of(world) or dist.PrefixStore("world", meeting))

    def reconnect_others(self, meeting: dist.Store, *, alone: bool) -> None:
        """Connect anew every group that all its members know; every rank has to do so.

        A group of which a member knows nothing, since its process is new, stays without
        connections and says so when it is used.

        Args:
            meeting: The generation's own part of the store.
            alone: Every rank of the world is new: there is nothing to agree on.
        """
        world: Any = dist.group.WORLD
        torch_private.set_store(world, meeting)
        if alone:
            self._meeting = None
            self._note_made()
            return
        torch_private.set_group_count(self.generation * NAMES_PER_GENERATION)
        mine = {name: g for name, g in self._alive.items() if g is not world}
        known = {name: group.members for name, group in mine.items()}
        meeting.set(f"groups/{dist.get_rank()}", json.dumps(known))
        ranks = range(dist.get_world_size())
        theirs = [json.loads(text) for text in meeting.multi_get([f"groups/{r}" for r in ranks])]
        # In the same order everywhere, so that no two ranks wait for each other in different ones.
        for name, group in sorted(mine.items()):
            missing = [r for r in group.members if theirs[r].get(name) != group.members]
            if missing:
                group.mark_outdated(missing)
            else:
                self._carry_over(group)
                store = None if group.recipe.is_gloo else self._store_of(group)
                group.connect(store or dist.PrefixStore(f"group{name}", meeting))
        self._meeting = None
        torch_private.refresh_modules()
        self._note_made()

    def _note_made(self) -> None:
        """All groups are connected, and nothing is under way, as far as that can be known here."""
        is_known = (
            self.recorder.sees_all
            and not self._detail  # compares by operations of its own
            and not torch_private.connects_later()
            and all(group.recipe.is_gloo for group in list(self._alive.values()))
        )
        if is_known:
            self.recorder.connections.made(self.generation)

    def _carry_over(self, group: SwappableGroup) -> None:
        """A group of an earlier generation goes on in this one, on all its members."""
        group.number = 0
        self._made[group.getGroupName(), tuple(group.members)] = 1


class SwappableGroup(Collectives):
    """The group that user code holds."""

    def __init__(
        self,
        groups: Groups,
        name: str,
        members: Sequence[int],
        rank: int,
        timeout: timedelta,
        is_world: bool,
        recipe: torch_private.Recipe = torch_private.GLOO,
    ):
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self.ranks = list(members)
        """The numbers of its members in the default group."""
        self.members = list(members)
        """Which ranks of the session they are."""
        self.is_foreign = False
        """Some of its members are no ranks of the session, so nothing can be compared with them."""
        self.is_ended = False
        """Code has destroyed it."""
        self.is_world = is_world
        self.recipe = recipe
        enqueues = {device: name != "gloo" for device, name in recipe.backends.items()}
        self._enqueues = enqueues
        """Device types, and whether their operations are given to the device."""
        self._enqueues_all = (
            next(iter(enqueues.values())) if len({*enqueues.values()}) == 1 else None
        )
        """The same where it is one for all of them."""
        self._sole_device = (
            next(iter(enqueues)) if self._enqueues_all and len(enqueues) == 1 else ""
        )
        """The device type to which every operation is given, if there is but one."""
        self._order = 0
        """``layout.IN_GROUP_ORDER`` where its backend runs one operation after the other."""
        self._takes_parts = not recipe.is_gloo
        self._met: set[str] = set()
        """Device types that the group has used, so that all members have made its communicator."""
        self._coalesced: list[tuple[Stream, int, int]] | None = None
        """Operations that are put together, between the beginning and the end of that."""
        self._groups = groups
        self._recorder = groups.recorder
        self._my_rank = rank
        self.limit = self._limit = timeout
        self._seconds = timeout.total_seconds()
        self._name = name
        self._description = "undefined"
        self.title = ""
        self.set_members(members)
        self._unusable = ""
        self.number = 0
        """How many groups of its name there were before, in this generation."""
        self._stream: Stream | None = None
        self._generation = -1
        self._keys: set[int] = set()
        self._finalizer: Any = None
        """Lets its streams go with it."""
        self.inner: Any = None
        self._hooks: dict[tuple[str, int], Any] = {}
        """Code's own, by their kind and number, for each inner group anew."""
        self.recording: Any = None
        """Lets torch's flight recorder follow the inner group."""
        self.devices: list[torch.device] = []

    def set_members(self, members: Sequence[int], is_foreign: bool = False) -> None:
        """Say which ranks of the session its members are."""
        self.members, self.is_foreign = list(members), is_foreign
        if is_foreign:
            self.title = "own group" if self.is_world else f"own group {self._name}"
        elif not self.is_world:
            self.title = f"group {self._name} (ranks {format_ranks(members)})"
        elif self.members == list(range(len(self._recorder.board.regions))):
            self.title = WORLD
        else:
            self.title = f"own group ({ranks_text(members)})"

    # --- connections ------------------------------------------------------------------------------

    def connect(self, store: dist.Store) -> None:
        """Replace the inner group; returns when all members have.

        Raises:
            CollectiveError: Connecting was given up. Who comes late is not to look for members that
                have heard of that: gloo would wait for them, and no abort reaches it there.
        """
        if self._recorder.abort is not None:
            raise self._recorder.abort_error()
        old = [self.inner]
        self._unusable = "this process group is not connected."
        self.inner = _Unconnected(self._unusable)
        if old[0] is not None:  # its threads may need a moment to end, for which nobody has to wait
            threading.Thread(target=old.clear, name="distsession-old-group", daemon=True).start()
        self.use(self._groups.make_native(self, store))
        self._unusable = ""

    def use(self, inner: Any) -> None:
        """Pass operations on to this group from here on."""
        self._coalesced = None
        self.inner = inner
        torch_private.note_within(inner, self.ranks)
        self._met = set()
        for (kind, number), hook in self._hooks.items():
            getattr(inner, f"register_{kind}")(number, hook)
        if not self.recipe.is_gloo:
            self._order = layout.IN_GROUP_ORDER if torch_private.runs_in_order(inner) else 0
            # Those of a device's works are found here: see find_overdue().
            torch_private.lift_time_limits(inner)

    def mark_outdated(self, missing: Sequence[int]) -> None:
        """It cannot be connected any more."""
        self._unusable = (
            f"this process group (ranks {format_ranks(self.members)}) was made before rank "
            f"{format_ranks(missing)} was replaced, which does not know it: make it again, on all "
            f"ranks, with dist.new_group({self.members})."
        )
        self.inner = _Unconnected(self._unusable)

    def check_usable(self) -> None:
        """Raise what there is to raise instead of beginning an operation."""
        if self._recorder.abort is not None:
            raise self._recorder.abort_error()
        if self._unusable:
            raise CollectiveError(self._unusable)

    def check_time(self, began: float, limit: timedelta | None) -> None:
        """Raise what gloo does where a receive from any rank takes longer than it may.

        Args:
            began: When, by ``time.monotonic()``.
            limit: How long it may take. Default: the group's limit.
        """
        seconds = self._seconds if limit is None else limit.total_seconds()
        if time.monotonic() - began > seconds and not self._recorder.is_input_awaited():
            raise RuntimeError(late_receive_text(seconds))

    # --- recording --------------------------------------------------------------------------------

    def _own_stream(self) -> Stream:
        if self._stream is None or self._generation != self._groups.generation:
            self._stream = self._find_stream(self.title, self.members)
        return self._stream

    def _pair_stream(self, source: int, target: int, tag: int) -> Stream:
        """The messages from one rank of the group to another."""
        for rank in (source, target):
            self.check_member(rank)
        ends = (self.members[source], self.members[target])
        return self._find_stream(Pair(self.title, *ends, tag).name, ends, tag)

    def _find_stream(self, name: str, members: Sequence[int], tag: int = 0) -> Stream:
        groups, recorder = self._groups, self._recorder
        if self.is_foreign:
            members = (recorder.rank,)
        if self._generation != groups.generation:
            self._generation = groups.generation
            self._stream = None
            self._keys = set()
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(
                self, recorder.drop_streams, recorder.epoch, self._keys
            )
            self._finalizer.atexit = False
        stream = recorder.stream((groups.generation, self.number), name, members, tag=tag)
        stream.is_gloo, stream.limit = self.recipe.is_gloo, self._seconds
        self._keys.add(stream.key)
        return stream

    def _any_stream(self) -> Stream:
        """What this rank receives from whoever sends first."""
        name = Pair(self.title, None, self._recorder.rank).name
        return self._find_stream(name, self.members)

    @contextmanager
    def recorded(
        self,
        key: tuple[Any, ...],
        *,
        meets: bool = False,
        from_any: bool = False,
        limit: float | None = None,
    ) -> Iterator[None]:
        """Record what is no collective of torch's, such as the making of a group.

        Args:
            key: What it is.
            meets: It begins only when all members have come.
            from_any: It is a receive from whoever sends first.
            limit: Seconds within which they have to come. Default: the group's limit.
        """
        if self._unusable:
            raise CollectiveError(self._unusable)
        stream = self._any_stream() if from_any else self._own_stream()
        at = stream.post(key, layout.WAITING)
        has_met = False
        try:
            if meets and self._recorder.check:
                stream.meet(at, self._seconds if limit is None else limit)
            has_met = True
            self._recorder.block(at)
            yield
        except CollectiveMismatchError:
            stream.refuse(at)
            raise
        except BaseException as error:
            explained = self._recorder.explain(error)
            if has_met:
                stream.end(at)
            else:
                stream.leave(at, error)
            try:
                raise explained from None
            finally:
                del explained  # its traceback has this frame, and that the group's connections
        else:
            stream.end(at)
        finally:
            self._recorder.block(0)

    @contextmanager
    def stands_in(
        self,
        text: Callable[[Sequence[int], float], str],
        kind: type[BaseException] = RuntimeError,
    ) -> Iterator[None]:
        """Let what ends the block be what torch raises there, too.

        Args:
            text: Of torch's error; gets who did not come, by their ranks within the group, and the
                time limit in seconds.
            kind: Its type.
        """
        try:
            yield
        except CollectiveMismatchError:
            raise
        except CollectiveError as error:
            reason, stream = cause.find(error), self._own_stream()
            late = [r for r in self.members if stream.posted_by(r) < stream.count]
            limit = self._seconds
            if isinstance(reason, TimedOut):
                late, limit = list(reason.missing), reason.limit
            missing = [self.members.index(r) for r in late if r in self.members]
            in_torchs_place(error, text(missing, limit), kind)
            raise

    def connect_text(self, missing: Sequence[int], limit: float) -> str:
        """What torch says where members of a new group do not come: it waits for an address."""
        return key_text([f"{self._name}//cpu//0/{r}" for r in missing[:1]], limit)

    def sender(self, tag: int) -> int:
        """A member that has begun to send here and whose message is not taken yet; -1 if none."""
        for rank in range(len(self.members)):
            if rank != self._my_rank:
                stream = self._pair_stream(rank, self._my_rank, tag)
                if stream.posted_by(self.members[rank]) > stream.count:
                    return rank
        return -1

    def _collective(
        self,
        call: Callable[[Any], Any],
        key: tuple[Any, ...],
        is_async: bool,
        tensor: torch.Tensor | None,
        has_sizes: bool = False,
    ) -> Any:
        if self._unusable:
            raise CollectiveError(self._unusable)
        stream = self._stream
        if stream is None or self._generation != self._groups.generation:
            stream = self._own_stream()
        device = self._sole_device
        if device or (self._enqueues_all is not False and (device := self._enqueued_on(tensor))):
            return self._enqueue(
                call,
                stream,
                key,
                device,
                tensor,
                meets=True,
                has_sizes=has_sizes,
                waits=not is_async,
            )
        recorder = self._recorder
        if is_async:
            return self._issue(call, stream, stream.post(key), key, has_sizes=has_sizes)
        at = stream.post(key, layout.WAITING)
        try:
            stream.meet(at, self._seconds)
            if has_sizes:
                stream.compare_sizes(at)
            recorder.enter(stream, at)
        except CollectiveMismatchError:
            stream.refuse(at)
            raise
        except BaseException as error:
            stream.leave(at, error)
            raise
        work = None
        try:
            work = call(self.inner)
            if work is not None:
                await_collective(work, recorder, stream, at)
        except BaseException as error:
            recorder.connections.lose()
            explained = recorder.explain(error)  # as long as it can be seen what broke off
            if work is None:  # gloo has refused it, and goes on as if it had not been called
                stream.withdraw(at)
            else:
                stream.fail_begun(at)
            recorder.leave(at)
            try:
                raise explained from None
            finally:
                del explained  # its traceback has this frame, and that the group's connections
        stream.end_call(at)
        return work

    def _issue(
        self,
        call: Callable[[Any], Any],
        stream: Stream,
        at: int,
        key: tuple[Any, ...],
        *,
        is_message: bool = False,
        has_sizes: bool = False,
    ) -> Any:
        """Begin an operation without waiting for it."""
        connections = self._recorder.connections
        try:
            stream.compare(at)
            if has_sizes and self._recorder.check:
                stream.compare_sizes(at, is_async=True)
            self._recorder.enter(stream)
            number = connections.issue()
            try:
                work = call(self.inner)
                stream.accepted(at)
                if not is_message:
                    connections.follow(number, work)
            except BaseException:
                connections.lose()
                raise
            finally:
                self._recorder.leave()
            limit = self.limit if is_message and self.recipe.is_gloo else None
            return IssuedWork(
                work, stream, at, key, number, is_message=is_message, message_limit=limit
            )
        except BaseException as error:
            # Who has left the group may have closed a connection: that is found for what waits.
            self._recorder.block(at)
            explained = self._recorder.explain(error)
            self._recorder.block(0)
            stream.withdraw(at)
            try:
                raise explained from None
            finally:
                del explained  # its traceback has this frame, and that the group's connections

    def _enqueued_on(self, tensor: torch.Tensor | None) -> str:
        """The device type to which its operation is given; empty where it is done on the CPU."""
        if tensor is None:  # a barrier: torch takes the one of the default device
            return next((d for d, enqueues in self._enqueues.items() if enqueues), "")
        device = tensor.device.type
        return device if self._enqueues.get(device, self._enqueues_all) else ""

    def _enqueue(
        self,
        call: Callable[[Any], Any],
        stream: Stream,
        key: tuple[Any, ...],
        device: str,
        tensor: torch.Tensor | None,
        *,
        meets: bool,
        has_sizes: bool = False,
        waits: bool = False,
    ) -> Any:
        """Give an operation to a device; gives torch's own handle.

        Args:
            call: Does so.
            stream: Where it is posted.
            key: What it is.
            device: The device's type.
            tensor: One that it is about; None for a barrier, which may wait within the call.
            meets: All members have to come, so they can meet before.
            has_sizes: Each may send others something else.
            waits: The device's current stream waits for it, also where it runs in another.
        """
        at = stream.post(key)
        recorder = self._recorder
        is_first = meets and device not in self._met
        try:
            if is_first or (meets and self._groups.strict):
                if recorder.check:
                    stream.meet(at, self._seconds)
                    if has_sizes:
                        stream.compare_sizes(at)
            else:
                stream.compare(at)
                if has_sizes and recorder.check:
                    stream.compare_sizes(at, is_async=True)
        except CollectiveMismatchError:
            stream.refuse(at)
            raise
        except BaseException as error:
            stream.leave(at, error)
            raise
        coalesced = self._coalesced
        # The call itself may wait for the others, and one of them may have died since it came: a
        # communicator is made at its first operation, that of two ranks at their first message, and
        # NCCL connects the ranks at the first operation of each kind and order of size.
        recorder.block(at, self._seconds)
        try:
            work = call(self.inner)
            if recorder.abort is not None:  # which may have freed it, without a word
                raise recorder.abort_error()
            if is_first and coalesced is None:
                self._met.add(device)
            stream.returned(at)
        except BaseException as error:
            stream.withdraw(at)
            raise recorder.explain(error) from None
        finally:
            recorder.block(0)
        if coalesced is not None:
            coalesced.append((stream, at, stream.sequence_word(at)))
        elif work is not None:
            number = device_stream_number(tensor.device) if waits and tensor is not None else 0
            stream.enqueued(at, work, self._seconds, 0, number | self._order)
        elif tensor is not None and (mark := Mark.behind(tensor.device)):
            stream.enqueued(at, mark, self._seconds, 0, mark.device_stream | self._order)
        else:
            stream.end(at)
        return work

    def coalesces(self, device: torch.device) -> bool:
        """Whether its backend for this device can put operations together."""
        self.check_usable()
        return bool(self.inner._get_backend(device).supports_coalescing)

    def _start_coalescing(self, device_type: torch.device) -> None:
        self.check_usable()
        if self._enqueues.get(device_type.type, self._enqueues_all):
            self._coalesced = []
        self.inner._start_coalescing(device_type)

    def _end_coalescing(self, device_type: torch.device) -> Any:
        device = device_type
        together, self._coalesced = self._coalesced or (), None
        recorder = self._recorder
        if together:  # which may wait for others, as any call may that gives a device something
            recorder.block(together[0][1], self._seconds)
        try:
            work = self.inner._end_coalescing(device)
        except BaseException as error:
            raise recorder.explain(error) from None
        finally:
            recorder.block(0)
        self._met.add(device.type)
        seen = work if work is not None or not together else Mark.behind(device)
        for stream, at, posted in together:
            if seen is not None:
                stream.enqueued(at, seen, self._seconds, posted, self._order)
            else:
                stream.end(at)
        return work

    def leave_coalescing(self, device: torch.device) -> None:
        """End what an error has left open, or whatever comes next would be put into it.

        A backend cannot take back what it was given by then: that begins, and others may never come
        to it. So the group is connected anew after the run.
        """
        if self._coalesced is None:
            return
        if self._coalesced:
            self._recorder.mark_damaged()
        with suppress(Exception):  # the one that has left it is told
            self._end_coalescing(device)

    def _message(
        self,
        call: Callable[[Any], Any],
        key: tuple[Any, ...],
        ends: tuple[int, int],
        tag: int,
        tensor: torch.Tensor,
    ) -> Any:
        if self._unusable:
            raise CollectiveError(self._unusable)
        stream = self._pair_stream(*ends, tag)
        device = self._sole_device
        if device or (self._enqueues_all is not False and (device := self._enqueued_on(tensor))):
            return self._enqueue(call, stream, key, device, tensor, meets=False)
        return self._issue(call, stream, stream.post(key), key, is_message=True)

    def _any_source(self, tensors: Any, tag: int) -> Any:
        self.check_usable()
        if not self._recorder.check or self.is_foreign:
            return self.inner.recv_anysource(tensors, tag)
        return AnySourceWork(self, tensors, tag)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> SwappableGroup | None:
        """A group whose communicator is split from this one's; all members have to call it.

        Args:
            ranks: Within this group, those of the new one.
            timeout: Of its operations. Default: this group's.
            opts: Of its backend.
            group_name: Its name.
            group_desc: What it is for.
            device_types: Those that it serves. Default: all of this group's.

        Returns:
            The new group; None on a rank that is none of its members.
        """
        limit = self.limit if timeout is None else timeout
        self.check_usable()
        self._recorder.connections.lose()
        with self.recorded(("split_group",), meets=True):
            # Older torches know fewer of them.
            given = {"timeout": timeout, "opts": opts, "group_name": group_name}
            given |= {"group_desc": group_desc, "device_types": device_types}
            inner = self.inner.split_group(
                ranks, **{name: value for name, value in given.items() if value is not None}
            )
        if inner is None:
            return None
        kinds = None if device_types is None else {device.type for device in device_types}
        backends = [
            f"{d}:{b}" for d, b in self.recipe.backends.items() if kinds is None or d in kinds
        ]
        recipe = torch_private.Recipe(",".join(backends), opts, self.recipe.device_id)
        members = [self.members[rank] for rank in ranks]
        return self._groups.adopt(inner, inner.group_name, members, limit, recipe)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        self._recorder.connections.lose()  # it is made of messages, and may leave some
        with self.stands_in(
            lambda missing, limit: monitored_text(
                self._my_rank, missing, limit, all_ranks=wait_all_ranks
            )
        ):
            return super().monitored_barrier(timeout, wait_all_ranks)

    # --- what else torch asks of a group ----------------------------------------------------------

    def set_limit(self, timeout: timedelta) -> None:
        """Its operations have another limit, of which torch has told what is within."""
        self.limit = self._limit = timeout
        self._seconds = timeout.total_seconds()
        if self._stream is not None:
            self._stream.limit = self._seconds

    def set_timeout(self, timeout: timedelta) -> None:
        self.check_usable()
        self.inner.set_timeout(timeout)
        if not self.recipe.is_gloo:
            torch_private.lift_time_limits(self.inner)
        self.set_limit(timeout)

    def getBackendName(self) -> str:
        return torch_private.BACKEND  # C++ would look for the backend of another name here

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        return bool(getattr(self.inner, "use_pg_for_symm_mem_rendezvous", False))

    @use_pg_for_symm_mem_rendezvous.setter
    def use_pg_for_symm_mem_rendezvous(self, value: bool) -> None:
        self.inner.use_pg_for_symm_mem_rendezvous = value

    def name(self) -> str:
        if self.recipe.is_gloo or isinstance(self.inner, _Unconnected):
            return next(iter(self.recipe.backends.values()))
        return str(self.inner.name())

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def supports_reconfigure(self) -> bool:
        return False  # a session connects its groups anew by itself

    @property
    def _device_types(self) -> Any:
        return self.devices  # none as long as torch is making the group

    def __repr__(self) -> str:
        return f"<process group {self._name} of ranks {format_ranks(self.members)}>"


class _Unconnected:
    """Is in the place of the inner group where there is none, or can be none any more.

    Whatever is asked of it raises. Code can still leave the group.

    Args:
        text: Of the error.
    """

    _device_types: Sequence[torch.device] = ()

    def __init__(self, text: str):
        self._text = text

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def _wait_for_pending_works(self) -> None:
        pass

    def _has_hooks(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else CollectiveError(self._text)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: SwappableGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _past_the_group(name: str) -> Callable[..., Any]:
    passed_on = _passed_on(name)

    def method(self: SwappableGroup, *args: Any, **kwargs: Any) -> Any:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            self._recorder.connections.lose()
        return passed_on(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = """What is done by that is not seen here; torch itself asks what it can do."""
    return method


def _registers(kind: str) -> Callable[..., None]:
    def method(self: SwappableGroup, hook_id: int, hook: Any) -> None:
        getattr(self.inner, f"register_{kind}")(hook_id, hook)
        self._hooks[kind, hook_id] = hook

    method.__name__ = f"register_{kind}"
    return method


def _unregisters(kind: str) -> Callable[..., None]:
    def method(self: SwappableGroup, hook_id: int) -> None:
        getattr(self.inner, f"unregister_{kind}")(hook_id)
        self._hooks.pop((kind, hook_id), None)

    method.__name__ = f"unregister_{kind}"
    return method


def _told_by_inner(name: str) -> property:
    return property(lambda self: getattr(self.inner, name))


for _kind in ("pre_hook", "post_hook", "abort_hook"):  # since torch 2.15
    if hasattr(dist.ProcessGroup, f"register_{_kind}"):
        setattr(SwappableGroup, f"register_{_kind}", _registers(_kind))
        setattr(SwappableGroup, f"unregister_{_kind}", _unregisters(_kind))
for _name in ("supports_abort_hooks", "supports_completion_hooks", "supports_window"):
    if hasattr(dist.ProcessGroup, _name):
        setattr(SwappableGroup, _name, _told_by_inner(_name))
for _name in ("_get_backend", "abort", "shutdown", "_wait_for_pending_works"):
    if hasattr(dist.ProcessGroup, _name):
        setattr(SwappableGroup, _name, _past_the_group(_name))
for _name in (
    "_add_ephemeral_timeout",
    "_backend_id",
    "_enable_collectives_timing",
    "_get_backend_name",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_register_on_completion_hook",
    "_set_sequence_number_for_group",
    "get_backend",
    "get_group_store",
    "new_window",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(SwappableGroup, _name, _passed_on(_name))
