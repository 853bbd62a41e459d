"""Ranks: naming some of them, and the facts about each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from distsession.errors import OptionsError

__all__ = [
    "DeviceInfo",
    "GpuSlice",
    "Host",
    "HostInfo",
    "RankInfo",
    "RankSelector",
    "count_text",
    "format_ranks",
    "host_names",
    "hosts_of",
    "parse_ranks",
    "ranks_text",
    "select_hosts",
    "select_ranks",
]

RankSelector = int | slice | Sequence[int]


@dataclass(frozen=True)
class DeviceInfo:
    """The device of one rank, as the rank itself sees it.

    Attributes:
        device: torch's name for it, ``"cpu"``, ``"cuda:0"`` or ``"xpu:0"``.
        name: The model, such as ``"NVIDIA H200"`` or the processor's name.
        memory_bytes: Total memory of the device (of the host, for a CPU); 0 where unknown.
        threads: Threads that torch uses for one operation on the CPU.
        uuid: By which the driver knows a GPU, whatever number it has in which process.
    """

    device: str
    name: str
    memory_bytes: int = 0
    threads: int = 0
    uuid: str = ""


@dataclass(frozen=True)
class RankInfo:
    """Where one rank stands in the process group, and on what it runs.

    ``host`` is the name of its machine, or, of several hosts, what the session calls it.
    ``torch_changes`` are sentences on what of torch has changed, and is off therefore.
    ``backend_class`` names torch's class of what gives operations to a device, such as
    ``"ProcessGroupNCCL2"``, and ``nccl`` NCCL's version; they are empty with gloo.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    nodes: int
    host: str
    pid: int
    backend: str
    device: DeviceInfo
    generation: int = 0
    torch_version: str = ""
    python_version: str = ""
    torch_changes: tuple[str, ...] = ()
    backend_class: str = ""
    nccl: str = ""

    @property
    def backend_text(self) -> str:
        """The backend as people read it: ``nccl (ProcessGroupNCCL2), NCCL 2.30.7``."""
        text = f"{self.backend} ({self.backend_class})" if self.backend_class else self.backend
        return f"{text}, NCCL {self.nccl}" if self.nccl else text


@dataclass(frozen=True)
class Host:
    """One of the hosts of a session, or a node that a machine plays.

    Attributes:
        name: What it is called here: by the user, by itself, or ``"node1"`` if it is only played.
        node: Its number.
        ranks: Those that are on it.
        gpus: The GPUs of its ranks, each as torch and the driver call it there.
        address: Where the other hosts reach it; empty where all are one machine.
    """

    name: str
    node: int
    ranks: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    address: str = ""


@dataclass(frozen=True)
class GpuSlice:
    """A part of a GPU that is divided (MIG), with memory and processors of its own.

    Attributes:
        uuid: By which the driver knows it, ``"MIG-..."``.
        gpu: The number of the GPU that it is a part of.
    """

    uuid: str
    gpu: int


@dataclass(frozen=True)
class HostInfo:
    """What an agent found on its host before any rank was started.

    Attributes:
        host: Host name.
        pid: Process id of the agent.
        gpus: Names of the GPUs that this session may see, in order.
        backends: Each process-group backend that this torch offers, with the device types that
            it can serve.
        torch_version: ``torch.__version__``.
        cpus: Processors that this process may use.
        gpu_uuids: By which the driver knows the GPUs, in the same order; empty where nobody asked,
            unless a GPU is divided.
        divided: Numbers of the GPUs that are divided into slices (MIG).
        slices: Their slices, as far as this session may see them.
        accelerators: How many devices there are of each type other than cpu and cuda that a
            backend serves.
        nccl: The version of NCCL, such as ``(2, 30, 7)``; empty without it.
    """

    host: str
    pid: int
    gpus: tuple[str, ...]
    backends: tuple[tuple[str, tuple[str, ...]], ...]
    torch_version: str
    cpus: int
    gpu_uuids: tuple[str, ...] = ()
    divided: tuple[int, ...] = ()
    slices: tuple[GpuSlice, ...] = ()
    accelerators: tuple[tuple[str, int], ...] = ()
    nccl: tuple[int, ...] = ()


def hosts_of(infos: Sequence[RankInfo], address: Callable[[int], str]) -> tuple[Host, ...]:
    """The hosts of ranks, in the order of the nodes.

    Args:
        infos: The facts of all ranks.
        address: Where a node is reached.
    """
    nodes: dict[int, list[RankInfo]] = {}
    for info in infos:
        nodes.setdefault(info.node_rank, []).append(info)
    names = [here[0].host for here in nodes.values()]
    found = []
    for node, here in sorted(nodes.items()):
        name = here[0].host
        gpus = {info.device.device: info.device.name for info in here}
        found.append(
            Host(
                name if names.count(name) == 1 else f"node{node}",
                node,
                tuple(info.rank for info in here),
                tuple(f"{device} ({gpu})" for device, gpu in gpus.items() if device != "cpu"),
                address(node),
            )
        )
    return tuple(found)


def host_names(infos: Iterable[RankInfo]) -> dict[int, str]:
    """The host of each rank; nothing where all are on one."""
    return {info.rank: info.host for info in infos if info.nodes > 1}


def select_hosts(wanted: Iterable[str | int], hosts: Sequence[Host]) -> tuple[int, ...]:
    """The ranks of some hosts.

    Args:
        wanted: Their names, or numbers of nodes.
        hosts: All that there are.

    Raises:
        OptionsError: There is no such host, or none is named.
    """
    chosen: set[int] = set()
    for one in wanted:
        number = int(one) if isinstance(one, str) and one.isdecimal() else one
        by_name = [host for host in hosts if host.name == one]
        found = by_name or [
            host for host in hosts if host.node == number and not isinstance(number, bool)
        ]
        if not found:
            names = ", ".join(f"{host.name} ({ranks_text(host.ranks)})" for host in hosts)
            close = difflib.get_close_matches(str(one), [host.name for host in hosts], n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise OptionsError(f"there is no host {one!r}: this session has {names}.{hint}")
        chosen.update(found[0].ranks)
    if not chosen:
        names = ", ".join(host.name for host in hosts)
        raise OptionsError(f"no host is named: this session has {names}.")
    return tuple(sorted(chosen))


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks the short way: ``[0, 1, 2, 5]`` becomes ``"0-2,5"``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Read ranks as a person types them in a magic: ``"0"``, ``"1-3"``, ``"0,2"``, ``"1:"``.

    Raises:
        OptionsError: The text is no list of ranks, or names one outside the world.
    """
    chosen: list[int] = []
    for part in text.strip("[]() ").split(","):
        part = part.strip()
        try:
            if ":" in part:
                bounds = [int(bound) if bound.strip() else None for bound in part.split(":")]
                chosen.extend(range(*slice(*bounds).indices(world_size)))
            elif "-" in part[1:]:
                first, last = part.rsplit("-", 1)
                chosen.extend(range(int(first), int(last) + 1))
            else:
                chosen.append(int(part))
        except (ValueError, TypeError):
            raise OptionsError(
                f"{text!r} does not name ranks: write 0, 0,2, 1-3 or 1: (of {world_size} ranks)."
            ) from None
    return select_ranks(chosen, world_size)


def select_ranks(selector: RankSelector, world_size: int) -> tuple[int, ...]:
    """Turn what stands between the brackets of ``session[...]`` into ranks.

    Negative numbers count from the end, as in a list.

    Raises:
        OptionsError: A rank outside the world, none at all, or something that is not a rank.
    """
    if isinstance(selector, slice):
        wanted = list(range(*selector.indices(world_size)))
    elif isinstance(selector, int):
        wanted = [selector]
    else:
        try:
            wanted = [_as_int(item) for item in selector]
        except TypeError:
            raise OptionsError(
                f"ranks are chosen by a number, a slice or a list of numbers, not {selector!r}."
            ) from None
    if not wanted:
        raise OptionsError(f"{selector!r} chooses none of the {world_size} ranks.")
    chosen: list[int] = []
    for rank in wanted:
        if not -world_size <= rank < world_size:
            raise OptionsError(
                f"there is no rank {rank}: this session has ranks 0 to {world_size - 1}."
            )
        chosen.append(rank % world_size)
    return tuple(sorted(set(chosen)))


def _as_int(item: object) -> int:
    if isinstance(item, int) and not isinstance(item, bool):
        return item
    raise TypeError(item)


def count_text(count: int) -> str:
    """``1 rank`` or ``4 ranks``."""
    return f"{count} rank{'s' * (count != 1)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 2`` or ``ranks 0-3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
