"""Giving a rank another place: in a script's own process group, or in a world of several hosts.

torch is imported where it is used: the kernel imports this module to send its functions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from distsession.distributed.environ import RankEnvironment, torchrun_variables

__all__ = ["leave_group", "run_in_world", "with_local_rank"]


def leave_group() -> None:
    """Leave the session's process group, so that a script can make its own, as under torchrun."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def with_local_rank(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with this rank's place on its host before its other arguments."""
    return function(int(os.environ["LOCAL_RANK"]), *args, **kwargs)


def run_in_world(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    *,
    url: str,
    host: str,
    port: int,
    first_rank: int,
    world_size: int,
) -> tuple[Any, bool]:
    """Call a function as a rank of a world of several hosts.

    The group is torch's own: what ours adds needs memory that all ranks share.

    Args:
        call: The function and its arguments; in a tuple, so that no names of the session's own
            ranks are given to it.
        url: Where all ranks meet.
        host: The same, for the environment.
        port: The same, for the environment.
        first_rank: The world's rank of this session's rank 0.
        world_size: Of the world.

    Returns:
        The function's value, and whether all ranks of the world came to the end.
    """
    import torch.distributed as dist

    from distsession.distributed import rank_info
    from distsession.engine.collectives import torch_private
    from distsession.engine.execute import run_call
    from distsession.engine.namespace import rank_names

    backend = dist.get_backend()
    rank = first_rank + int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = rank_info.device()
    leave_group()
    with _environment(rank, world_size, host, port), torch_private.native_groups():
        dist.init_process_group(
            backend,
            init_method=url,
            rank=rank,
            world_size=world_size,
            device_id=device if device.type == "cuda" else None,
        )
        namespace = rank_names(rank, local_rank, world_size, device)
        try:
            # torch does not wait until all are connected, and rank 0 has the store: nobody may
            # leave before all others have come, and have ended.
            dist.barrier()
            value = run_call(*call, namespace)
            try:
                dist.barrier()
            except RuntimeError:  # another rank failed, and says so itself
                return value, False
            return value, True
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


@contextlib.contextmanager
def _environment(rank: int, world_size: int, host: str, port: int) -> Iterator[None]:
    """The variables by which libraries find their place, and no others of the session's group."""
    before = dict(os.environ)
    place = RankEnvironment("torchrun", rank, world_size, address=host, port=port)
    os.environ.update(torchrun_variables(place, roles=True))
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    is_here = host in ("127.0.0.1", "::1", "localhost")
    for name in () if is_here else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if os.environ.get(name) in ("lo", "lo0"):  # other hosts cannot be reached by it
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
