"""What to say at the start of GPUs that other processes fill."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from distsession.protocol.agent_messages import GpuHolder, GpuMemory
from distsession.ranks import RankInfo, ranks_text

__all__ = ["full_gpus"]

LEAST_FREE = 0.1
"""Share of a GPU's memory below which it counts as full."""
SHOWN = 3
"""How many of the processes that hold it are named."""


def full_gpus(
    gpus: Mapping[int, Iterable[GpuMemory]],
    infos: Iterable[RankInfo],
    pids: Mapping[int, Collection[int]] | None = None,
) -> tuple[str, ...]:
    """A sentence on each GPU that other processes fill.

    Args:
        gpus: Of each node, as its agent found them.
        infos: Of the ranks; where there are none, each GPU is looked at.
        pids: Of the ranks on each node's host, whose own memory does not count.
    """
    ranks: dict[tuple[int, str], list[int]] = {}
    for info in infos:
        ranks.setdefault((info.node_rank, info.device.uuid), []).append(info.rank)
    found = []
    for node, there in gpus.items():
        own = (pids or {}).get(node, ())
        for gpu in there:
            users = ranks.get((node, gpu.uuid), [])
            if (users or not ranks) and (text := _full_text(gpu, users, own)):
                found.append(text)
    return tuple(dict.fromkeys(found))  # nodes that one machine plays have the same


def _full_text(gpu: GpuMemory, ranks: list[int], pids: Collection[int]) -> str:
    own = sum(max(0, holder.nbytes) for holder in gpu.holders if holder.pid in pids)
    if gpu.total <= 0 or gpu.free + own >= LEAST_FREE * gpu.total:
        return ""
    others = [holder for holder in gpu.holders if holder.pid not in pids]
    others.sort(key=lambda holder: -holder.nbytes)
    held = [_holder_text(holder) for holder in others[:SHOWN]]
    if len(others) > SHOWN:
        held.append(f"{len(others) - SHOWN} more hold the rest")
    who = ", ".join(held) or "the driver names no process that holds the rest"
    whose = f" of {ranks_text(ranks)}" if ranks else ""
    free = f"{_gib(gpu.free + own)} of {_gib(gpu.total)} GiB free"
    part = f"Slice {gpu.uuid} of " if gpu.uuid.startswith("MIG-") else ""
    return f"{part}GPU {gpu.number} ({gpu.name}){whose} has {free}: {who}."


def _holder_text(holder: GpuHolder) -> str:
    user = f" of {holder.user}" if holder.user else ""
    amount = f"{_gib(holder.nbytes)} GiB" if holder.nbytes >= 0 else "some of it"
    return f"pid {holder.pid}{user} holds {amount}"


def _gib(nbytes: int) -> str:
    amount = nbytes / 2**30
    return f"{amount:.1f}" if amount < 10 else f"{amount:.0f}"
