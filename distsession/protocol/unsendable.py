"""Values that live on their rank: why they cannot be sent, and what can be had in their place.

Types are known by their names, for no module of theirs need be imported here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Unsendable", "is_refused", "unsendable"]

_BOUND = "it lives in its own process"
_MODULE = (
    "its process group lives on its rank alone",
    "{the}.module, the module within, can be sent, and so can {the}.module.state_dict().",
)
_PULL_MODULE = (
    "session.pull('{the}.module') brings the module within, "
    "session.evaluate('{the}.module.state_dict()') its weights."
)
_SHARDED = (
    "each rank has a part of its weights, and its process group",
    "get_model_state_dict({the}, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) "
    "of torch.distributed.checkpoint.state_dict, called on all ranks, gives all weights.",
)
_ITERATOR = (
    "how far it has come is known in its own process only",
    "list({the}) gives its values, and so it ends.",
)
_KNOWN: dict[str, tuple[str, str]] = {
    "DistributedDataParallel": _MODULE,
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "ProcessGroup": (_BOUND, "dist.get_process_group_ranks({the}) gives its ranks."),
    "Work": (_BOUND, "Wait for it there with {the}.wait(), and pull the tensor."),
    "Store": (_BOUND, "{the}.get(KEY) gives what a key has."),
    "Future": (_BOUND, "{the}.result(), or wait() of a Future of torch, gives its value."),
    "CUDAGraph": (_BOUND, "Pull the tensors that it writes to."),
    "_BaseDataLoaderIter": (_ITERATOR[0], "Pull the DataLoader, or next({the})."),
    "_IOBase": (_BOUND, "{the}.name gives its path."),
    "generator": _ITERATOR,
    "coroutine": (_BOUND, "`await` it in a cell, and pull its value."),
}
_MODULES = ("torch", "builtins", "_io", "concurrent", "asyncio", "_asyncio")
"""A class of the user's may have the same name."""


class Unsendable(TypeError):
    """An object that could be pickled, and not be rebuilt elsewhere."""


def is_refused(obj: Any) -> bool:
    """Whether it could be pickled, but looks for a process group where it is rebuilt."""
    kind = type(obj)
    return "DistributedDataParallel" in (kind.__name__, getattr(kind.__base__, "__name__", ""))


def unsendable(obj: Any, name: str) -> tuple[str, str] | None:
    """Why an object cannot be sent, and what can; None for one of which nothing is known.

    Args:
        obj: The object.
        name: What it is called in code; empty where it has no name.
    """
    for kind in type(obj).__mro__:
        if kind.__name__ in _KNOWN and kind.__module__.partition(".")[0] in _MODULES:
            why, remedy = _KNOWN[kind.__name__]
            if kind.__name__ == "DistributedDataParallel" and name:
                remedy = _PULL_MODULE
            return why, remedy.format(the=name or "VALUE")
    return None
