"""Importing this makes the device and the backend ``standin`` known to torch, in this process.

It starts no thread, so processes that fork afterwards have them, too.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from tests.standin import runtime
from tests.standin.extension import native


def create(options: Any, backend_options: Any) -> Any:
    """The backend of one process group, as torch asks for it."""
    own = native.ProcessGroupStandin.Options
    if not isinstance(backend_options, own):
        given, backend_options = backend_options, own()
        if given is not None:
            backend_options._timeout = given._timeout
    backend_options._timeout = options.timeout or datetime.timedelta(minutes=10)
    backend_options.global_ranks_in_group = options.global_ranks_in_group
    backend_options.group_name = options.group_id
    return native.ProcessGroupStandin(
        options.store, options.group_rank, options.group_size, backend_options
    )


def register() -> None:
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", runtime)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("standin", create, extended_api=True, devices=["standin"])


register()
