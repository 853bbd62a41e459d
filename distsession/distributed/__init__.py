"""Helpers for code that runs on ranks; no session is needed.

``import distsession.distributed as dd`` works on the ranks of a session, under torchrun, Slurm and
MPI, and in one process alone. Names are loaded when they are first used: the processes of a session
need few of them at their start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distsession.distributed.auto import auto_dataloader, auto_model, auto_optim
    from distsession.distributed.collectives import (
        all_gather,
        barrier,
        broadcast,
        gather,
        synchronize,
    )
    from distsession.distributed.data import DistributedProxySampler, ExactSampler, get_sampler
    from distsession.distributed.environ import RankEnvironment, read_environment
    from distsession.distributed.groups import device_mesh, get_group, new_group, split_group
    from distsession.distributed.guards import (
        one_rank_first,
        one_rank_only,
        run_local_rank_zero_first,
    )
    from distsession.distributed.initialization import (
        finalize,
        initialize,
        initialize_cpu,
        process_group,
    )
    from distsession.distributed.objects import all_gather_object, broadcast_object_list
    from distsession.distributed.ports import get_available_local_url
    from distsession.distributed.rank_info import (
        available_backends,
        backend,
        device,
        get_global_rank,
        get_local_rank,
        get_local_world_size,
        get_nnodes,
        get_node_rank,
        get_nproc_per_node,
        get_rank,
        get_world_size,
        hostname,
        is_available,
        is_initialized,
        model_name,
        set_local_rank,
        show_config,
        sync,
    )
    from distsession.distributed.reductions import Pending, all_reduce, reduce
    from distsession.distributed.scattering import all_to_all, scatter
    from distsession.distributed.seeding import seed_everything

__all__ = [
    "DistributedProxySampler",
    "ExactSampler",
    "Pending",
    "RankEnvironment",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "device",
    "device_mesh",
    "finalize",
    "gather",
    "get_available_local_url",
    "get_global_rank",
    "get_group",
    "get_local_rank",
    "get_local_world_size",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_sampler",
    "get_world_size",
    "hostname",
    "initialize",
    "initialize_cpu",
    "is_available",
    "is_initialized",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "process_group",
    "read_environment",
    "reduce",
    "run_local_rank_zero_first",
    "scatter",
    "seed_everything",
    "set_local_rank",
    "show_config",
    "split_group",
    "sync",
    "synchronize",
]

_MODULES = (
    "rank_info",
    "environ",
    "ports",
    "initialization",
    "reductions",
    "collectives",
    "scattering",
    "objects",
    "groups",
    "guards",
    "data",
    "auto",
    "seeding",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = importlib.import_module(f"{__name__}.{module}")
            if name in found.__all__:
                value = globals()[name] = getattr(found, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
