"""Beginning and ending a process group.

What ``initialize`` finds it leaves alone: a group that is there already is joined, and ``finalize``
then leaves it to whoever has made it. So a script with both runs on the ranks of a session, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from distsession.distributed import rank_info
from distsession.distributed.environ import RankEnvironment, read_environment, torchrun_variables
from distsession.distributed.ports import release_port
from distsession.distributed.validate import (
    as_limit,
    as_place,
    check_backend,
    check_options,
    check_place,
    check_present,
    known_backend,
    split_url,
)
from distsession.errors import OptionsError, ProcessGroupError

__all__ = ["finalize", "initialize", "initialize_cpu", "process_group"]

P = ParamSpec("P")
T = TypeVar("T")

_begun: list[dict[str, str | None] | None] = []
"""For each ``initialize`` that has not ended: None if the group was there already, otherwise the
environment variables to put back."""

_count = 0


def initialize(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    **options: Any,
) -> None:
    """Join the default process group; returns when all ranks have.

    Rank and world size are those given, or those that torchrun, Slurm, Open MPI or a PMI launcher
    has set in the environment. Where nothing says that there are other ranks, a group of one is
    made. A group that is there already is kept, if it is what is asked for. It may be repeated
    after :func:`finalize`, also at the same address.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or any other that torch knows. Default: ``"nccl"`` where
            there is a GPU, otherwise ``"gloo"``.
        init_method: Where to meet: ``env://`` (the default: at ``MASTER_ADDR`` and
            ``MASTER_PORT``, or where the launcher's variables say), ``tcp://HOST:PORT``, or
            ``file://PATH``. ``?rank=0&world_size=2`` at its end says the same as the arguments.
        store: To meet through this store instead.
        rank: Of this process. -1 is the same as None.
        world_size: Number of processes. -1 is the same as None.
        timeout: Seconds (or a ``timedelta``) that a collective, and this, may take.
        **options: More for ``torch.distributed.init_process_group``.

    Raises:
        OptionsError: Arguments or environment variables that cannot work; it names them.
        ProcessGroupError: The group could not be built, or another one is there.
    """
    if not dist.is_available():
        raise ProcessGroupError("this torch was built without torch.distributed.")
    backend = known_backend(backend)
    check_options(options)
    limit = as_limit(timeout)
    rank, world_size = as_place(rank, "rank"), as_place(world_size, "world_size")
    url, rank, world_size = split_url(init_method, store, rank, world_size)
    if dist.is_initialized():
        check_present(backend, rank, world_size)
        _begun.append(None)
        return
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    check_backend(chosen)
    found = read_environment() if rank is None or world_size is None else None
    mine, size = check_place(rank, world_size, found, url, store)
    local_rank = _local_rank(found)
    if "nccl" in chosen and local_rank is not None:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    saved: dict[str, str | None] = {}
    if found is not None and found.source != "torchrun":
        saved = _set_torchrun_variables(found)
    try:
        _init_group(chosen, url, store, mine, size, limit, found, options)
    except BaseException as error:
        _restore(saved)
        if isinstance(error, OptionsError) or not isinstance(error, RuntimeError | ValueError):
            raise
        raise ProcessGroupError(
            f"rank {mine} of {size} could not join the process group ({chosen}, "
            f"{'a given store' if store is not None else url}): {error}"
        ) from error
    release_port(url.partition("?")[0])
    rank_info.forget_hosts()
    _begun.append(saved)
    if size > 1:
        rank_info.get_local_rank()  # now, while every rank is here to say on which host it is


def finalize(*, force: bool = False) -> None:
    """End what the last :func:`initialize` has begun. Harmless where nothing was begun.

    A group that was there before :func:`initialize` stays.

    Args:
        force: Destroy the default process group whoever has made it, and forget all that was begun.
    """
    if force:
        saved = [entry for entry in _begun if entry is not None]
        _begun.clear()
    else:
        entry = _begun.pop() if _begun else None
        saved = [] if entry is None else [entry]
    if (saved or force) and rank_info.is_initialized():
        dist.destroy_process_group()
        rank_info.forget_hosts()
    for variables in saved:
        _restore(variables)


def initialize_cpu(
    rank: int = 0,
    world_size: int = 1,
    init_method: str | None = None,
    *,
    dist_url: str | None = None,
    timeout: float | timedelta | None = 60.0,
) -> None:
    """A gloo group for tests, of this process alone or of processes that the test has started.

    The environment is not asked.

    Args:
        rank: Of this process.
        world_size: Number of processes.
        init_method: Where they meet, such as what :func:`get_available_local_url` gives.
        dist_url: The same, by the name that flame has for it.
        timeout: Seconds (or a ``timedelta``) that a collective, and this, may take.

    Raises:
        OptionsError: Several processes, and no ``init_method``; or this is given by both names.
        ProcessGroupError: As for :func:`initialize`.
    """
    if init_method is not None and dist_url is not None:
        raise OptionsError("init_method= and dist_url= are two names for one thing: give one.")
    init_method = dist_url if init_method is None else init_method
    if init_method is None:
        if world_size != 1:
            raise OptionsError(
                f"initialize_cpu(world_size={world_size}) needs init_method=, the same on all "
                "ranks: get_available_local_url() gives one."
            )
        store = None if rank_info.is_initialized() else dist.HashStore()
        initialize("gloo", store=store, rank=rank, world_size=1, timeout=timeout)
        return
    initialize("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)


class _ProcessGroup:
    """What :func:`process_group` gives."""

    def __init__(self, backend: str | None, options: dict[str, Any]):
        self._backend = backend
        self._options = options

    def __enter__(self) -> _ProcessGroup:
        initialize(self._backend, **self._options)
        return self

    def __exit__(self, *_: object) -> None:
        finalize()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return within


@overload
def process_group(backend: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def process_group(backend: str | None = None, **options: Any) -> _ProcessGroup: ...
def process_group(backend: Any = None, **options: Any) -> Any:
    """:func:`initialize` before, :func:`finalize` after, also when something raises.

    As a context manager or as a decorator, with or without parentheses::

        with process_group("gloo"):
            train()

        @process_group(timeout=60)
        def main():
            return train()

    A decorated function's value is returned, and its exceptions pass.

    Args:
        backend: See :func:`initialize`.
        **options: See :func:`initialize`.
    """
    if callable(backend):
        return _ProcessGroup(None, {})(backend)
    return _ProcessGroup(backend, options)


# --- the parts of initialize --------------------------------------------------------------------


def _local_rank(found: RankEnvironment | None) -> int | None:
    given = rank_info.given_local_rank()
    if given is not None:
        return given
    if found is not None:
        return found.local_rank
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else None


def _init_group(
    backend: str,
    init_method: str,
    store: dist.Store | None,
    rank: int,
    size: int,
    limit: timedelta | None,
    found: RankEnvironment | None,
    options: dict[str, Any],
) -> None:
    global _count
    if store is None and init_method.startswith("env:"):
        if size == 1:
            store = dist.HashStore()
        elif found is not None and found.source != "torchrun":
            host = f"[{found.address}]" if ":" in str(found.address) else found.address
            init_method = f"tcp://{host}:{found.port}"
    if store is None:
        waiting = {} if limit is None else {"timeout": limit}
        store, _, _ = next(iter(dist.rendezvous(init_method, rank, size, **waiting)))
        if limit is not None:
            store.set_timeout(limit)
    # What an earlier group has left in the same store must not be found by a later one. The first
    # one has the keys that torch itself would use, so that it meets ranks that use torch alone.
    prefix = "default_pg" if _count == 0 else f"distsession/{_count}"
    _count += 1
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=size,
        timeout=limit,
        **options,
    )


def _set_torchrun_variables(found: RankEnvironment) -> dict[str, str | None]:
    """Set those by which libraries find their place; gives what was there."""
    new = torchrun_variables(found)
    saved = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    return saved


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        with contextlib.suppress(KeyError):
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
