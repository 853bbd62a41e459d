"""Importing this makes the device ``standin`` known to torch, in this process, and its backends.

These are ``standin``, ``standin2`` and ``standin-lazy``. It starts no thread, so processes that
fork afterwards have them, too.
"""

from __future__ import annotations

import datetime
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.standin import runtime
from tests.standin.extension import native


def own_options(options: Any, backend_options: Any) -> Any:
    own = native.ProcessGroupStandin.Options
    if not isinstance(backend_options, own):
        given, backend_options = backend_options, own()
        if given is not None:
            backend_options._timeout = given._timeout
    backend_options._timeout = options.timeout or datetime.timedelta(minutes=10)
    backend_options.global_ranks_in_group = options.global_ranks_in_group
    backend_options.group_name = options.group_id
    return backend_options


def create(options: Any, backend_options: Any) -> Any:
    """The backend of one process group, as torch asks for it: ``_create_nccl_process_group``."""
    own = own_options(options, backend_options)
    parent = split_source(options)
    own.split_from = parent if isinstance(parent, native.ProcessGroupStandin) else None
    return native.ProcessGroupStandin(options.store, options.group_rank, options.group_size, own)


def create2(options: Any, backend_options: Any) -> Any:
    """The same of torch 2.15's other class: ``_create_nccl2_process_group``."""
    return create_eager(native.ProcessGroupStandin2, options, backend_options)


def create_lazy(options: Any, backend_options: Any) -> Any:
    """And of its third: ``_create_nccl_lazy_process_group``."""
    return create_eager(native.ProcessGroupStandinLazy, options, backend_options)


def create_eager(kind: type, options: Any, backend_options: Any) -> Any:
    own = own_options(options, backend_options)
    parent = split_source(options)
    if isinstance(parent, kind):
        return parent.split(options.store, options.global_ranks_in_group, own)
    asked = SimpleNamespace(
        process_group=group_of(options),
        enable_reconfigure=False,
        global_ranks_in_group=options.global_ranks_in_group,
        group_rank=options.group_rank,
    )
    device = c10d._nccl2_device(asked)
    return kind(options.store, options.group_rank, options.group_size, own, device)


def split_source(options: Any) -> Any:
    """What the communicator is to be split from; up to torch 2.14 only NCCL's class is told."""
    if hasattr(options, "split_from"):
        return options.split_from
    default = dist.group.WORLD
    return (
        None if default is None or not default.bound_device_id else c10d._get_split_source(default)
    )


def group_of(options: Any) -> Any:
    """The group that a backend is made for; up to torch 2.14 the backend is not told."""
    if hasattr(options, "process_group"):
        return options.process_group
    frame = sys._getframe()
    while frame is not None and "dist_backend_opts" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["pg"]


def choose_device(options: Any) -> torch.device:
    """``_nccl2_device`` of torch 2.15, for this device in place of CUDA's."""
    group = options.process_group
    device = None if group is None else group.bound_device_id
    if device is not None:
        return device
    count = native.device_count()
    if "LOCAL_RANK" in os.environ:
        index = int(os.environ["LOCAL_RANK"]) % count
    else:
        ranks = options.global_ranks_in_group
        index = (ranks[options.group_rank] if ranks else options.group_rank) % count
    device = torch.device("standin", index)
    if group is not None:
        group.bound_device_id = device
    return device


def register() -> None:
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", runtime)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("standin", create, extended_api=True, devices=["standin"])
    dist.Backend.register_backend("standin2", create2, extended_api=True, devices=["standin"])
    dist.Backend.register_backend(
        "standin-lazy", create_lazy, extended_api=True, devices=["standin"]
    )
    c10d._nccl2_device = choose_device


# As the classes that they play: only the lazy one has streams for pairs of ranks.
native.ProcessGroupStandin2.runs_in_order = True
native.ProcessGroupStandinLazy.runs_in_order = False
register()
