"""What ``initialize`` is asked for, checked before anyone waits."""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import torch
import torch.distributed as dist

from distsession.devices import is_nccl, too_old_for
from distsession.distributed import rank_info
from distsession.distributed.accelerator import nccl_names
from distsession.distributed.environ import RankEnvironment
from distsession.errors import OptionsError, ProcessGroupError

__all__ = [
    "as_limit",
    "as_place",
    "check_address",
    "check_backend",
    "check_options",
    "check_place",
    "check_present",
    "known_backend",
    "split_url",
]


def as_limit(timeout: Any) -> timedelta | None:
    """A time limit as torch takes it."""
    limit = timeout
    is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if is_number and math.isfinite(timeout):
        limit = timedelta(seconds=float(timeout))
    if limit is not None and not (isinstance(limit, timedelta) and limit > timedelta()):
        raise OptionsError(f"timeout={timeout!r} is neither seconds above 0 nor a timedelta.")
    return limit


def as_place(value: Any, name: str) -> int | None:
    """A rank or a number of ranks; None where torch's -1 leaves it open, too."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OptionsError(f"{name}={value!r} is not a whole number.")
    return None if value == -1 else int(value)


def split_url(
    init_method: Any, store: dist.Store | None, rank: int | None, world_size: int | None
) -> tuple[str, int | None, int | None]:
    """The address without the place that it may hold, and the place."""
    if init_method is None:
        return "env://", rank, world_size
    if store is not None:
        raise OptionsError("store= and init_method= are two places to meet at: give one of them.")
    url = str(init_method)
    scheme, _, rest = url.partition("://")
    is_known = isinstance(init_method, str) and scheme in ("env", "tcp", "file")
    if not is_known or (scheme != "env" and not rest):
        raise OptionsError(
            f"init_method={init_method!r} is none of env://, tcp://HOST:PORT and file://PATH."
        )
    if scheme == "tcp" and not _has_address(url):
        raise OptionsError(f"init_method={url!r} has no host and port as in tcp://HOST:PORT.")
    address, mark, query = url.partition("?")
    words = dict(parse_qsl(query, keep_blank_values=True))
    given = {"rank": rank, "world_size": world_size}
    for name in given.keys() & words.keys():
        text = words.pop(name)
        if given[name] is not None:
            raise OptionsError(f"init_method={url!r} and {name}= both say it: give one of them.")
        if not text.isdecimal():
            raise OptionsError(f"init_method={url!r}: {name}={text!r} is not a whole number.")
        given[name] = int(text)
    more = mark + urlencode(words) if words else ""
    return address + more, given["rank"], given["world_size"]


def _has_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port is not None
    except ValueError:  # no number, or none that a port can have
        return False


def check_options(options: Mapping[str, Any]) -> None:
    """What is passed on has to be what ``init_process_group`` takes."""
    parameters = inspect.signature(dist.init_process_group).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            known = ", ".join(known for known in parameters if not known.startswith("_"))
            raise OptionsError(f"initialize has no option {name}=: torch takes {known}.")


def known_backend(backend: Any) -> str | None:
    """A backend in lower case, as torch has it, if this torch or a plugin knows its name."""
    if backend is None:
        return None
    name = str(backend).lower()
    known = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    known += nccl_names()
    parts = [part.rpartition(":")[2].strip() for part in name.split(",")]
    for part in parts:
        if part not in known and is_nccl(part):
            raise OptionsError(too_old_for(part, str(torch.__version__)))
    if not isinstance(backend, str) or any(part not in known for part in parts):
        has = ", ".join(rank_info.available_backends())
        raise OptionsError(f"backend={backend!r} is not known: this torch has {has}.")
    return name


def check_present(backend: str | None, rank: int | None, world_size: int | None) -> None:
    """A group that is there already has to be what is asked for."""
    here = (str(dist.get_backend()), dist.get_rank(), dist.get_world_size())
    for name, asked, is_there in zip(
        ("backend", "rank", "world_size"), (backend, rank, world_size), here, strict=True
    ):
        fits = asked is None or asked == is_there
        if name == "backend" and asked is not None:
            fits = str(is_there).lower() in str(asked) or str(asked) in str(is_there).lower()
        if not fits:
            raise ProcessGroupError(
                f"there is a process group already, with {name}={is_there!r} and not {asked!r}: "
                "finalize(force=True) ends it."
            )


def check_backend(backend: str) -> None:
    """The backend has to be one that this torch, and this machine, has."""
    known = rank_info.available_backends()
    for part in backend.split(","):
        name = part.split(":")[-1].strip()
        family = "nccl" if is_nccl(name) else name
        if family in ("nccl", "gloo", "mpi", "ucc") and family not in known:
            raise OptionsError(f"backend={backend!r}: this torch has only {', '.join(known)}.")
        if family == "nccl" and not torch.cuda.is_available():
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
    if store is None and init_method.startswith("env:") and size > 1:
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
