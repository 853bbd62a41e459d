"""Where this process is: its rank, its host, its device, its backend.

Every function follows torch's default process group, whoever has made it, and answers without one
as the only rank of a world of one.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed import torch_private
from distsession.distributed.accelerator import accelerator_of, backends_of, current_device
from distsession.distributed.environ import read_environment
from distsession.errors import OptionsError, ProcessGroupError

__all__ = [
    "available_backends",
    "backend",
    "device",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "hostname",
    "is_available",
    "is_initialized",
    "model_name",
    "set_local_rank",
    "show_config",
    "sync",
]

HOSTS_TIMEOUT_S = 20.0
"""Seconds that a rank waits for the others to say on which host they are."""

_log = logging.getLogger("distsession.distributed")


@dataclass(frozen=True)
class _Node:
    """Where a rank is among the ranks of its host, and its host among the hosts."""

    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nodes: int = 1


_SINGLE_NODE = _Node()
_hint: int | None = None
_known: tuple[Any, _Node] | None = None  # a weak reference to the group that it is about


def is_available() -> bool:
    """Whether this torch can do distributed work at all."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """This process's rank in the world, or in a group.

    Without a process group it is 0, whatever the environment says: use
    :func:`get_global_rank` or :func:`read_environment` for what a launcher has said.

    Args:
        group: A process group, or a list of ranks. Default: the world.

    Returns:
        The rank; -1 for a process that is no member of ``group``.

    Raises:
        OptionsError: ``group`` is neither.
    """
    return _of_group(dist.get_rank, group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Number of ranks in the world, or in a group; 1 without a process group.

    Args:
        group: A process group, or a list of ranks. Default: the world.

    Returns:
        The number; -1 for a process that is no member of ``group``.

    Raises:
        OptionsError: ``group`` is neither.
    """
    return _of_group(dist.get_world_size, group) if is_initialized() else 1


def get_global_rank(group: Any = None) -> int:
    """Like :func:`get_rank`, but before there is a group it says what the launcher has said.

    Args:
        group: A process group, or a list of ranks. Default: the world.

    Raises:
        OptionsError: The launcher's variables are wrong; or ``group`` is neither.
    """
    if is_initialized():
        return get_rank(group)
    found = read_environment()
    return 0 if found is None else found.rank


def get_local_rank() -> int:
    """This process's rank among those on its host; 0 without a process group.

    It comes from :func:`set_local_rank`, or else from the launcher's variables where they are about
    this group, or from the hosts of all ranks, which they tell each other through the store.

    Raises:
        OptionsError: The launcher's variables are wrong.
        ProcessGroupError: Other ranks did not say in time on which host they are.
    """
    if _hint is not None and is_initialized():
        return _hint
    return _node().local_rank


def get_local_world_size() -> int:
    """Number of ranks on this host; 1 without a process group. See :func:`get_local_rank`."""
    return _node().local_world_size


def get_nproc_per_node() -> int:
    """The same as :func:`get_local_world_size`, by the name that ignite has for it."""
    return _node().local_world_size


def get_nnodes() -> int:
    """Number of hosts; 1 without a process group. See :func:`get_local_rank`."""
    return _node().nodes


def get_node_rank() -> int:
    """Number of this host, from 0. See :func:`get_local_rank`."""
    return _node().node_rank


def set_local_rank(index: int) -> None:
    """Say which local rank this is, before or after the process group is made.

    It holds until :func:`sync`, whatever a launcher says.

    Args:
        index: The local rank, from 0.

    Raises:
        OptionsError: It is no whole number from 0.
    """
    global _hint
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise OptionsError(f"set_local_rank({index!r}): a local rank is a whole number from 0.")
    _hint = index


def sync(temporary: bool = False) -> None:
    """Forget what was found out about hosts and local ranks.

    A new process group is noticed without this. It is needed after the launcher's variables have
    been changed within a group, and to take :func:`set_local_rank` back.

    Args:
        temporary: Accepted since ignite has it; nothing depends on it.
    """
    global _hint
    _hint = None
    forget_hosts()


def forget_hosts() -> None:
    """Forget what was found out, but for what :func:`set_local_rank` has said."""
    global _known
    _known = None


def given_local_rank() -> int | None:
    """What :func:`set_local_rank` has said, if anything."""
    return _hint


def hostname() -> str:
    """The name of this host."""
    return socket.gethostname()


def device() -> torch.device:
    """The device on which this rank's tensors belong.

    Returns:
        The current GPU, or other accelerator, where the group's backend works on these alone
        (NCCL), otherwise the CPU. Without a process group the GPU where there is one, otherwise the
        CPU.
    """
    if not is_initialized():
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = "cuda" if "nccl" in str(dist.get_backend()) else accelerator_of(backends_of())
    return current_device(kind) if kind else torch.device("cpu")


def backend() -> str | None:
    """The backend of the default process group, such as ``"gloo"``; None without one."""
    return str(dist.get_backend()) if is_initialized() else None


def available_backends() -> tuple[str, ...]:
    """The backends that this torch was built with."""
    if not dist.is_available():
        return ()
    found = {
        "nccl": dist.is_nccl_available,
        "gloo": dist.is_gloo_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    return tuple(name for name, is_there in found.items() if is_there())


def model_name() -> str:
    """``"native-dist"`` in a process group, ``"serial"`` without one: ignite's names."""
    return "native-dist" if is_initialized() else "serial"


def show_config() -> str:
    """Show where this rank is.

    It goes to the logger ``distsession.distributed`` at level INFO, and to stderr where nobody
    listens to that.

    Returns:
        What was shown, a fact on each line.
    """
    facts = {
        "distributed configuration": model_name(),
        "backend": backend(),
        "device": device(),
        "hostname": hostname(),
        "world size": get_world_size(),
        "rank": get_rank(),
        "local rank": get_local_rank(),
        "num processes per node": get_nproc_per_node(),
        "num nodes": get_nnodes(),
        "node rank": get_node_rank(),
    }
    text = "\n".join(f"{name}: {value}" for name, value in facts.items())
    if _log.hasHandlers() and _log.isEnabledFor(logging.INFO):
        _log.info("%s", text)
    else:
        sys.stderr.write(text + "\n")
    return text


def _of_group(ask: Callable[[Any], int], group: Any) -> int:
    """What torch says of a group, or would say of the group of a list of ranks."""
    if isinstance(group, list | tuple | range) and all(isinstance(rank, int) for rank in group):
        # No group is made for it: this has to be possible on one rank alone.
        members, own = sorted(group), dist.get_rank()
        if own not in members:
            return -1
        return members.index(own) if ask is dist.get_rank else len(members)
    try:
        return ask(group)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise OptionsError(
            f"group={group!r} is neither a process group of this world nor a list of ranks."
        ) from error


def _node() -> _Node:
    global _known
    if not is_initialized():
        return _SINGLE_NODE
    world = dist.group.WORLD
    if _known is None or _known[0]() is not world:
        # Held weakly: a group that was destroyed must not keep its sockets for our sake.
        _known = (weakref.ref(world), _find_node(dist.get_rank(), dist.get_world_size()))
    return _known[1]


def _find_node(rank: int, world_size: int) -> _Node:
    if world_size == 1:
        return _SINGLE_NODE
    is_set = (
        os.environ.get("RANK") or os.environ.get("WORLD_SIZE") or not os.environ.get("LOCAL_RANK")
    )
    found = read_environment() if is_set else None
    if found is None or (found.rank, found.world_size) != (rank, world_size):
        return _node_from_hosts(rank, world_size, os.environ.get("LOCAL_RANK", ""))
    if found.local_rank is None or found.local_world_size is None:
        return _node_from_hosts(rank, world_size, str(found.local_rank or ""))
    # Hosts may have different numbers of ranks: what the launcher says of them comes first.
    nodes = found.nodes or -(-world_size // found.local_world_size)
    node_rank = found.node_rank
    if node_rank is None:
        node_rank = rank // found.local_world_size
    return _Node(found.local_rank, found.local_world_size, node_rank, max(nodes, node_rank + 1))


def _node_from_hosts(rank: int, world_size: int, local_rank: str) -> _Node:
    """Through the store and not by a collective, which would have to be called in step."""
    store = torch_private.default_store()
    keys = [f"distsession/host/{other}" for other in range(world_size)]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, timedelta(seconds=HOSTS_TIMEOUT_S))
    except RuntimeError:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise ProcessGroupError(
            f"nothing says which local rank this is, and within {HOSTS_TIMEOUT_S:g} s ranks "
            f"{missing} did not say on which host they are: call this on all ranks, set "
            "LOCAL_RANK and LOCAL_WORLD_SIZE with RANK and WORLD_SIZE, or use initialize()."
        ) from None
    hosts = [store.get(key).decode() for key in keys]
    mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    order = list(dict.fromkeys(hosts))
    index = int(local_rank) if local_rank.isdecimal() else mine.index(rank)
    return _Node(index, len(mine), order.index(hosts[rank]), len(order))
