"""Joining and leaving the process group of a generation."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Its functions take by default the group that was there when it was imported. Under torchrun, where
# a program imports it before there is one, that is none: the default group of the time of the call.
import torch.distributed.nn.functional

from distsession.distributed.accelerator import backends_of
from distsession.distributed.environ import rank_environment
from distsession.distributed.seeding import seed_everything
from distsession.engine import host_info, store, store_server
from distsession.engine.collectives import torch_changes, torch_private
from distsession.engine.collectives.group import Groups
from distsession.errors import CollectiveError
from distsession.protocol.agent_messages import StartRanks
from distsession.ranks import RankInfo

__all__ = [
    "Place",
    "can_keep",
    "forget_earlier",
    "inherited_environment",
    "is_gloo",
    "is_of_session",
    "join",
    "keep",
    "leave",
    "prepare",
    "rank_info",
]


NO_END_BY_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Both would end the process when a communicator is aborted, which is how a wait is ended."""

ABANDONED = "given up"
"""Key in a generation's part of the store: somebody waited for all others, and does no longer."""
NOT_ALIKE = "not alike"
"""Another: some of the ranks, not all, have a default group that user code has made."""
HAS_OWN = 1 << 32
"""Such a rank adds this to the number of those that have arrived."""

WITHOUT = "without a group"
"""Key in a generation's part of the store: how many ranks had none when it began."""


@dataclass(frozen=True)
class Place:
    """Where a rank belongs."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    nodes: int
    backend: str
    timeout: float | None
    device: torch.device
    store_port: int
    session: str
    store_path: str = ""
    host: str = ""


def prepare(start: StartRanks, rank: int, store_port: int) -> Place:
    """Set up threads, random numbers, environment and device; no CUDA context comes before that.

    A forked child inherits its parent's generators, so an unseeded rank gets fresh entropy.
    """
    local_rank = start.here.index(rank)
    device = torch.device(start.devices[local_rank])
    place = Place(
        rank=rank,
        local_rank=local_rank,
        world_size=start.world_size,
        local_world_size=len(start.devices),
        node_rank=start.node_rank,
        nodes=start.nodes,
        backend=start.backend,
        timeout=start.timeout,
        device=device,
        store_port=store_port,
        store_path=store_server.socket_path(start.folder),
        host=start.host,
        session=os.path.basename(start.folder),
    )
    inherited = inherited_environment()
    # Where all ranks are on this machine: without these, gloo and NCCL open ports on its network.
    interface = start.interface or _loopback()
    environ = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        **NO_END_BY_NCCL,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        **({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if start.is_shared else {}),
        **start.environ,
        **rank_environment(
            rank=rank,
            local_rank=local_rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
            nodes=place.nodes,
            address="127.0.0.1",
            port=store_port,
            threads=start.threads,
            run_id=place.session,
        ),
    }
    if start.visible and start.visible[local_rank]:
        environ["CUDA_VISIBLE_DEVICES"] = start.visible[local_rank]
    environ.pop("JPY_SESSION_NAME", None)  # ipykernel would put it into the user's namespace
    # Most of it is there, inherited: to set it again would copy all the memory that it is in.
    for name in inherited.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if inherited.get(name) != value:
            os.environ[name] = value
    sys.path[:] = start.sys_path
    os.chdir(start.cwd)

    torch.set_num_threads(start.threads)
    if start.seed is None:
        seed_everything(int.from_bytes(os.urandom(7), "big"))
    else:
        seed_everything(start.seed + (rank if start.seed_per_rank else 0))
    if device.type == "cuda":
        assert not torch.cuda._is_in_bad_fork(), "CUDA was initialised before the fork"
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
        torch_private.bind_to_current_device()
    return place


@functools.cache
def inherited_environment() -> Mapping[str, str]:
    """The environment that this process was forked with.

    It is looked through once: for ``os.environ`` that takes three calls of Python for each name.
    """
    return dict(os.environ)


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0] if names else "lo")


def join(
    place: Place,
    generation: int,
    groups: Groups | None = None,
    *,
    alone: bool = True,
    timeout: float | None = None,
) -> bool:
    """Join the process group of a generation; returns when all ranks have.

    Each generation has its own prefix in the store, so nothing of an earlier one is found there.

    Args:
        place: Of this rank.
        generation: Of the process group.
        groups: What keeps groups alive over generations; None where the backend cannot.
        alone: Every rank of the world is new, so there are no groups to agree on.
        timeout: Seconds that each step of connecting it may take; by default as any operation.

    Returns:
        Whether code had destroyed the group that was there before, on all ranks.
    """
    part = f"generation{generation}"
    meeting: dist.Store
    had_none = not alone and not dist.is_initialized()
    if groups is not None:
        client = store.session_store(place.store_path)
        client.renew()
        meeting = store.StorePart(part, client)
        backends_store = None
        if not is_gloo(place.backend):
            backends_store = dist.PrefixStore(part, store.connect_tcp(place.store_port))
        groups.prepare(meeting, generation, timeout, backends_store)
        groups.put_back_default()
        if not alone:
            has_own = _has_own(place, groups)
            if not _await_ranks(meeting, place.world_size, timeout, has_own=has_own):
                _give_up_own(place, groups)
    else:
        meeting = dist.PrefixStore(part, store.connect_tcp(place.store_port))
    if had_none:
        meeting.add(WITHOUT, 1)
    if groups is not None and groups.has_world and is_of_session(place, groups):
        groups.reconnect_world(meeting)
    else:
        leave()
        dist.init_process_group(
            place.backend,
            store=meeting,
            rank=place.rank,
            world_size=place.world_size,
            timeout=None if place.timeout is None else timedelta(seconds=place.timeout),
            device_id=_bound_device(place),
        )
    if groups is not None:
        groups.reconnect_others(meeting, alone=alone)
    return had_none and meeting.add(WITHOUT, 0) == place.world_size


def can_keep(place: Place, groups: Groups | None, begun: int) -> bool:
    """Whether this rank's connections can stay in the next generation.

    Args:
        place: Of this rank.
        groups: What keeps groups alive over generations.
        begun: How many operations it had begun when the kernel compared them with those of others.
    """
    if groups is None or not groups.has_world or not is_of_session(place, groups):
        return False
    recorder = groups.recorder
    return recorder.connections.are_whole and recorder.begun == begun


def keep(place: Place, generation: int, groups: Groups) -> None:
    """Go over into another generation with the connections that there are.

    What was left in the store is of no use any more, as with :func:`join`.
    """
    part = f"generation{generation}"
    client = store.session_store(place.store_path)
    client.set_timeout(store.DEFAULT_TIMEOUT)
    groups.keep(store.StorePart(part, client), generation)


def forget_earlier(place: Place, generation: int) -> None:
    """Delete what earlier generations have left in the store; all ranks have come to this one."""
    if place.rank == 0:
        # Of a store that ends nothing is left, and who needs it next finds out.
        with contextlib.suppress(store.StoreEndedError, CollectiveError):
            client = store.session_store(place.store_path)
            client.delete_earlier("generation", generation)


def is_gloo(backend: str) -> bool:
    """Whether nothing but gloo is in a backend's name, such as ``"cpu:gloo"``."""
    return {part.rpartition(":")[2] for part in backend.split(",")} == {"gloo"}


def is_of_session(place: Place, groups: Groups | None) -> bool:
    """Whether the group that there is has the session's ranks; user code may have made another."""
    if groups is not None:
        return groups.is_default(place.rank, place.world_size)
    return (dist.get_rank(), dist.get_world_size()) == (place.rank, place.world_size)


def _bound_device(place: Place) -> torch.device | None:
    """The device that the session's group is bound to; None where it is bound to none."""
    return place.device if place.device.type == "cuda" else None


def _has_own(place: Place, groups: Groups) -> bool:
    """Whether user code has made the default group in another way than the session does.

    A rank that is new knows nothing of it, and the two ways do not connect to each other.
    """
    recipe = groups.world_recipe
    if recipe is None or not is_of_session(place, groups):
        return False
    if recipe.is_gloo and is_gloo(place.backend):
        return False
    session = torch_private.Recipe(place.backend)
    return recipe.backends != session.backends or recipe.device_id != _bound_device(place)


def _give_up_own(place: Place, groups: Groups) -> None:
    """Let the default group be made as the session makes it; its groups stay where they can."""
    recipe = groups.world_recipe
    if recipe is not None and recipe.backends == torch_private.Recipe(place.backend).backends:
        groups.bind_world(_bound_device(place))
    else:
        leave()


def _await_ranks(
    meeting: dist.Store, world_size: int, timeout: float | None, *, has_own: bool
) -> bool:
    """Wait for all ranks here, where one can be told to stop, rather than within gloo.

    Args:
        meeting: The generation's own part of the store.
        world_size: How many ranks come.
        timeout: Seconds to wait.
        has_own: User code has made this rank's default group in another way than the session does.

    Returns:
        Whether this rank can connect that group anew: all ranks have theirs from the session, or
        none has.
    """
    # Both are counted in one call of the store.
    own, count = divmod(meeting.add("arrived", 1 + HAS_OWN * has_own), HAS_OWN)
    if meeting.check([ABANDONED]):
        raise CollectiveError("connecting the process group was given up before it began here.")
    if count == world_size:
        if own not in (0, world_size):
            meeting.set(NOT_ALIKE, "")
        meeting.set("all have arrived", "")
    limit = store.DEFAULT_TIMEOUT if timeout is None else timedelta(seconds=timeout)
    try:
        meeting.wait(["all have arrived"], limit)
    except BaseException:
        # Who comes later, having been stopped, must not look for this rank within gloo.
        with contextlib.suppress(Exception):
            meeting.set(ABANDONED, "")
        raise
    return not (has_own and meeting.check([NOT_ALIKE]))


def leave() -> None:
    """Leave the process group, if there is one, and forget those that code has put away."""
    torch_private.forget_groups()


def rank_info(place: Place, generation: int) -> RankInfo:
    """The facts of this rank."""
    classes = _backend_classes(place)
    return RankInfo(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        nodes=place.nodes,
        host=place.host or socket.gethostname(),
        pid=os.getpid(),
        backend=place.backend,
        device=host_info.device_info(place.device),
        generation=generation,
        torch_version=str(torch.__version__),
        python_version=".".join(map(str, sys.version_info[:3])),
        torch_changes=torch_changes.sentences(),
        backend_class=", ".join(classes),
        nccl=".".join(map(str, host_info.nccl_version())) if "NCCL" in "".join(classes) else "",
    )


def _backend_classes(place: Place) -> list[str]:
    """The classes of torch that give the operations of the session's group to a device."""
    # Code may have made the default group anew, with another backend.
    if not dist.is_initialized() or backends_of() != torch_private.Recipe(place.backend).backends:
        return []
    world: Any = dist.group.WORLD
    found = torch_private.backend_classes(getattr(world, "inner", world))
    return sorted(kind.__name__ for kind in found)
