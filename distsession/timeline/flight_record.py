"""A cell in the format of torch's flight recorder, which ``torchfrtrace`` analyses.

torch writes one file for each rank, a pickled dictionary (``FlightRecorderDetail.hpp``). The
analysis is ``torch.distributed.flight_recorder``; ``components/types.py`` there says which names it
knows. It pairs operations by group and sequence number, which ours have as well.

What it has no words for is left out: the making of groups, operations with parts that differ by
rank, and messages to a rank that receives from any source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distsession.protocol.operation_names import WORLD, CodeLine, Pair, SplitSizes, details_of
from distsession.timeline.records import OperationRecord, RankTrace

__all__ = ["dumps"]

VERSION = "2.10"
"""Of the format, as torch 2.13 writes it."""

NAMES = {
    "all_gather": "all_gather",
    "all_gather_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor": "_all_gather_base",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "barrier",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "scatter": "scatter",
}
"""What torch calls our operations there."""
GATHERS = ("all_gather", "_all_gather_base", "all_gather_into_tensor_coalesced")
REDUCES_PARTS = ("reduce_scatter", "_reduce_scatter_base")

DTYPES = {
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "bfloat16": "BFloat16",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""How C++ names them. Others keep their name."""

Entry = dict[str, Any]
Tensors = tuple[list[list[int]], list[str]]
"""The shapes of tensors, and their dtypes."""

_TENSOR = re.compile(r"(\w+) \[([\d, ]*)\]")


def dumps(traces: Mapping[int, RankTrace], backend: str) -> dict[int, dict[str, Any]]:
    """The dictionary of each rank.

    Args:
        traces: What each rank has recorded.
        backend: Of the process group. The analysis knows ``gloo`` and ``nccl`` of ours, so any
            other is called ``gloo``.
    """
    library = "nccl" if "nccl" in backend else "gloo"
    open_ends = {
        (pair.group, pair.target)
        for trace in traces.values()
        for record in trace.operations
        if record.is_from_any and (pair := Pair.from_name(record.group)) is not None
    }
    return {rank: _dump(trace, library, open_ends) for rank, trace in traces.items()}


def _dump(trace: RankTrace, library: str, open_ends: set[tuple[str, int]]) -> dict[str, Any]:
    entries, groups = list[Entry](), dict[str, Sequence[int]]()
    for number, record in enumerate(trace.operations):
        pair = Pair.from_name(record.group)
        if pair is None:
            entry = _collective(record, library)
        elif pair.source is None or (pair.group, pair.target) in open_ends:
            continue
        else:
            entry = _message(record, pair, library)
        if entry is None:
            continue
        groups.setdefault(record.group, sorted(record.members))
        entries.append(
            {
                "record_id": trace.dropped + number,
                "pg_id": list(groups).index(record.group),
                "process_group": (record.group, _description(record.group)),
                **entry,
                **_progress(record, trace.epoch),
                "frames": list(_frames(record.place)),
            }
        )
    config = {
        name: {"name": name, "desc": _description(name), "ranks": str(list(ranks))}
        for name, ranks in groups.items()
    }
    return {"version": VERSION, "entries": entries, "pg_config": config, "rank": trace.rank}


def _description(group: str) -> str:
    return "default_pg" if group == WORLD else "undefined"


def _collective(record: OperationRecord, library: str) -> Entry | None:
    name = NAMES.get(record.name)
    if name is None:
        return None
    tensors = _tensors(record, name)
    if tensors is None:
        return None
    (input_sizes, input_dtypes), (output_sizes, output_dtypes) = tensors
    return {
        "collective_seq_id": record.sequence,
        "p2p_seq_id": 0,
        "op_id": record.sequence,
        "profiling_name": f"{library}:{name}",
        "is_p2p": False,
        "input_sizes": input_sizes,
        "input_dtypes": input_dtypes,
        "output_sizes": output_sizes,
        "output_dtypes": output_dtypes,
    }


def _message(record: OperationRecord, pair: Pair, library: str) -> Entry:
    """A send or receive, as of a group of its two ranks: the others need not come."""
    assert pair.source is not None
    ends = sorted(record.members)
    source, target = ends.index(pair.source), ends.index(pair.target)
    arrow = f"{source}->{target}" if record.name == "send" else f"{target}<-{source}"
    count = re.search(r"(\d+) elements", record.detail)
    sizes, dtypes = [[int(count[1]) if count else 0]], [_dtype(record.detail.partition(",")[0])]
    return {
        "collective_seq_id": record.sequence,
        "p2p_seq_id": record.sequence,
        "op_id": record.sequence,
        "profiling_name": f"{library}:{record.name} {arrow}",
        "is_p2p": True,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
    }


def _tensors(record: OperationRecord, name: str) -> tuple[Tensors, Tensors] | None:
    """What goes in and what comes out; None where that is not the same on all ranks."""
    if name == "barrier":
        return ([[1]], ["Float"]), ([[1]], ["Float"])
    parts = details_of(record.detail)
    if any(part.startswith("parts of ") for part in parts):
        return None
    if name == "all_to_all":
        splits = SplitSizes.from_description(record.detail)
        if splits is None:
            return None
        dtypes = [_dtype(parts[0].partition(" ")[0])]  # behind it may be the shape of a row
        return ([[sum(splits.send)]], dtypes), ([[sum(splits.receive)]], dtypes)
    found = [match for part in parts if (match := _TENSOR.fullmatch(part)) is not None]
    sizes = [[int(n) for n in match[2].split(",") if n.strip()] for match in found]
    dtypes = [_dtype(match[1]) for match in found]
    if not found:
        return None
    own: Tensors = (sizes, dtypes)
    whole: Tensors = ([[len(record.members), *size] for size in sizes], dtypes)
    if name in GATHERS:
        return own, whole
    if name in REDUCES_PARTS:
        return whole, own
    return own, own


def _dtype(name: str) -> str:
    return DTYPES.get(name, name)


def _progress(record: OperationRecord, epoch: int) -> Entry:
    is_done = record.ended > 0 and not record.failed
    return {
        "state": "completed" if is_done else "started",
        "time_created_ns": record.began + epoch,
        "time_discovered_started_ns": record.began + epoch,
        "time_discovered_completed_ns": record.ended + epoch if is_done else None,
        "duration_ms": (record.ended - record.began) / 1e6 if is_done else None,
        "retired": is_done,
        "timeout_ms": 0,
    }


def _frames(place: str) -> Iterator[dict[str, Any]]:
    if place:
        line = CodeLine.from_name(place)
        yield {"name": "<module>", "filename": line.file, "line": line.line}
