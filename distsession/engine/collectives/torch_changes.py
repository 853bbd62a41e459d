"""What a torch that nobody has tried has changed, and what is off without it.

Each part of torch that is not public and that something here leans on is looked for before that is
used. Where it is gone, that thing is off, the session works without it, and says so as it starts.
"""

from __future__ import annotations

import enum
import functools
import inspect
import pkgutil
from collections.abc import Sequence

import torch

from distsession.engine import host_info

__all__ = ["Part", "has_hooks", "is_untried", "is_usable", "sentences", "turn_off"]

TRIED = (2, 15)
"""The newest torch that the tests have passed with (docs/compatibility.md)."""

_C10D = "torch.distributed.distributed_c10d"
_RENDEZVOUS = "torch.distributed.rendezvous"
_DYNAMO = "torch._C._dynamo.eval_frame"
_DDP = "torch.nn.parallel:DistributedDataParallel"


class Part(enum.Enum):
    """Something that leans on torch's inside; its value is what is off without it."""

    GROUPS = (
        "what ranks call is neither seen nor compared, who waits for a rank that fails waits until "
        "Stop, and process groups of your own have to be made again after that"
    )
    RENDEZVOUS = "process groups that code makes by itself meet as under torchrun, without Stop"
    COMPILER = "torch.compile may fail in code that calls collectives or prints"
    REDUCER = "a DistributedDataParallel has to be made again after a Stop"
    ABORT = "Stop in NCCL's collectives is off"


_NAMES: dict[Part, Sequence[str]] = {
    Part.GROUPS: (
        f"{_C10D}:_new_process_group_helper",
        f"{_C10D}:_new_group_with_tag",
        f"{_C10D}:_hash_ranks_to_str",
        f"{_C10D}:_world.pg_map",
        f"{_C10D}:_world.pg_backend_config",
        f"{_C10D}:_world.group_count",
        "torch.distributed:Backend._plugins",
        "torch.distributed:ProcessGroup._set_default_backend",
        "torch.distributed:ProcessGroup._register_backend",
        "torch.distributed:ProcessGroupGloo._set_default_timeout",
    ),
    Part.RENDEZVOUS: (
        f"{_RENDEZVOUS}:_create_c10d_store",
        f"{_RENDEZVOUS}:_torchelastic_use_agent_store",
    ),
    Part.COMPILER: (
        f"{_DYNAMO}:_FrameAction.SKIP",
        f"{_DYNAMO}:_FrameExecStrategy",
        f"{_DYNAMO}:set_code_exec_strategy",
    ),
    Part.REDUCER: (
        f"{_DDP}._build_params_for_reducer",
        f"{_DDP}._build_debug_param_to_name_mapping",
        f"{_DDP}._ddp_init_helper",
    ),
    Part.ABORT: (f"{_C10D}:_abort_process_group",),
}

_HOOKS = (
    "torch.distributed:ProcessGroup.register_pre_hook",
    "torch.distributed:ProcessGroup.register_post_hook",
    f"{_C10D}:_maybe_attach_flight_recorder",
)
"""With which groups of torch's own can be followed, from torch 2.15 on."""
_GROUPS_WITH_HOOKS = "process groups and modules have to be made again after a Stop"
"""What is off then without ``Part.GROUPS``."""

_turned_off: dict[Part, str] = {}
"""By what was seen to fail."""


def is_untried() -> bool:
    """Whether this torch is newer than those that the tests have passed with."""
    return host_info.torch_release() > TRIED


def is_usable(part: Part) -> bool:
    """Whether all is there that this leans on."""
    return not _change(part)


@functools.cache
def has_hooks() -> bool:
    """Whether it can be seen what groups of torch's own do."""
    return all(map(_is_there, _HOOKS))


def turn_off(part: Part, name: str) -> None:
    """Do without this from here on, for this of torch's does not work as it did."""
    _turned_off.setdefault(part, name)


def sentences() -> tuple[str, ...]:
    """For each part that is off: what has changed, and what that means."""
    found = torch.__version__
    tried = ".".join(map(str, TRIED))
    start = (
        f"torch {found} is newer than this was tried with ({tried})"
        if is_untried()
        else f"torch {found} is not as it was tried"
    )
    changes = ((part, _change(part)) for part in Part)
    return tuple(f"{start}, and its {n} has changed: {_off(part)}." for part, n in changes if n)


def _off(part: Part) -> str:
    return _GROUPS_WITH_HOOKS if part is Part.GROUPS and has_hooks() else part.value


def _change(part: Part) -> str:
    return _turned_off.get(part) or _missing(part)


@functools.cache
def _missing(part: Part) -> str:
    """The first name that this leans on and that torch has not; empty if it has all."""
    return next((path.rpartition(".")[2].rpartition(":")[2] for path in _NAMES[part]
                 if not _is_there(path)), "")  # fmt: skip


def _is_there(path: str) -> bool:
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    is_maker = path.endswith(":_new_process_group_helper")
    return not is_maker or "backend" in inspect.signature(found).parameters
