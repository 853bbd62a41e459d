"""Ranks: naming some of them, and the facts about each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distsession.errors import OptionsError

__all__ = [
    "DeviceInfo",
    "GpuSlice",
    "HostInfo",
    "RankInfo",
    "RankSelector",
    "format_ranks",
    "parse_ranks",
    "ranks_text",
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

    ``torch_changes`` are sentences on what of torch has changed, and is off therefore.
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


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 2`` or ``ranks 0-3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
