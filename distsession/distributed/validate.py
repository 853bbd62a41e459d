"""What ``initialize`` is asked for, checked before anyone waits."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from distsession.distributed import rank_info
from distsession.distributed.environ import RankEnvironment
from distsession.errors import OptionsError, ProcessGroupError

__all__ = ["check_address", "check_backend", "check_place", "check_present"]


def check_present(backend: str | None, rank: int | None, world_size: int | None) -> None:
    """A group that is there already has to be what is asked for."""
    here = (str(dist.get_backend()), dist.get_rank(), dist.get_world_size())
    for name, asked, is_there in zip(
        ("backend", "rank", "world_size"), (backend, rank, world_size), here, strict=True
    ):
        fits = asked is None or asked == is_there
        if name == "backend" and asked is not None:
            fits = str(is_there).lower() in str(asked).lower() or str(asked) in str(is_there)
        if not fits:
            raise ProcessGroupError(
                f"there is a process group already, with {name}={is_there!r} and not {asked!r}: "
                "finalize(force=True) ends it."
            )


def check_backend(backend: str) -> None:
    """The backend has to be one that this torch, and this machine, has."""
    known = rank_info.available_backends()
    for part in backend.lower().split(","):
        name = part.split(":")[-1].strip()
        if name in ("nccl", "gloo", "mpi", "ucc") and name not in known:
            raise OptionsError(f"backend={backend!r}: this torch has only {', '.join(known)}.")
        if name == "nccl" and not torch.cuda.is_available():
            raise OptionsError(f"backend={backend!r} needs a GPU, and none is visible: use 'gloo'.")


def check_place(
    rank: int | None,
    world_size: int | None,
    found: RankEnvironment | None,
    init_method: str,
    store: dist.Store | None,
) -> tuple[int, int]:
    """This process's rank and the world size, from the arguments first."""
    if (rank is None) != (world_size is None) and found is None:
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise OptionsError(
            f"{given}= is given, but not {missing}=, and the environment does not say it either."
        )
    mine = rank if rank is not None else found.rank if found is not None else 0
    size = world_size if world_size is not None else found.world_size if found is not None else 1
    if size < 1 or not 0 <= mine < size:
        raise OptionsError(f"rank={mine} is not below world_size={size}, or below 0.")
    scheme = init_method.partition("://")[0]
    if store is None and scheme not in ("env", "tcp", "file"):
        raise OptionsError(
            f"init_method={init_method!r} is none of env://, tcp://HOST:PORT and file://PATH."
        )
    if store is not None and init_method != "env://":
        raise OptionsError("store= and init_method= are two places to meet at: give one of them.")
    if store is None and scheme == "env" and size > 1:
        check_address(found)
    return mine, size


def check_address(found: RankEnvironment | None) -> None:
    """Where ranks meet must be known before anyone waits."""
    address = found.address if found is not None else os.environ.get("MASTER_ADDR")
    port = found.port if found is not None else os.environ.get("MASTER_PORT")
    names = {"MASTER_ADDR": address, "MASTER_PORT": port}
    missing = [name for name, value in names.items() if not value]
    if missing:
        raise OptionsError(
            f"{' and '.join(missing)} not set: ranks meet at MASTER_ADDR:MASTER_PORT, the host of "
            "rank 0 and a free port there. Or give init_method='tcp://HOST:PORT'."
        )
