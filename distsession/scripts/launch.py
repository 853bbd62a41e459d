"""Run one function on ranks from a script: start, run, results, end.

:func:`launch` needs no options. :func:`start_training` takes :class:`LaunchOptions`, which say the
same for a script that has a command line or a file of settings, and for several hosts that each
start their share of the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from distsession.engine.world import run_in_world, with_local_rank
from distsession.errors import CollectiveError, OptionsError
from distsession.results import RankResults
from distsession.scripts.launch_options import LaunchOptions
from distsession.session import Session

__all__ = ["LaunchOptions", "launch", "start_training"]

T = TypeVar("T")


def launch(
    function: Callable[..., T],
    /,
    *args: Any,
    nproc_per_node: int | None = None,
    nnodes: int = 1,
    backend: str | None = None,
    **kwargs: Any,
) -> RankResults[T]:
    """Start ranks, call a function on each, end them, and give their results.

    Other options of a session come from the ``DISTSESSION_*`` variables.

    Args:
        function: What to call; lambdas and closures work, too. If its first parameter is named
            ``local_rank`` and has no default, it gets each rank's local rank there.
        *args: Its other positional arguments, the same on each rank.
        nproc_per_node: Number of ranks. Default: one per visible GPU, or 2 where there is none.
        nnodes: Number of hosts: 1. For more, start the script on each, with
            :func:`start_training`.
        backend: Process-group backend. Default: nccl on GPUs, gloo on CPU.
        **kwargs: Its keyword arguments.

    Returns:
        Each rank's value.

    Raises:
        OptionsError: An option that cannot work here.
        LaunchError: The ranks did not start.
        RunError: The function raised on a rank.
    """
    if isinstance(nnodes, bool) or nnodes != 1:
        raise OptionsError(
            f"nnodes={nnodes!r} is not possible: launch starts ranks on this host only. Start the "
            "script on each host with start_training(function, LaunchOptions(world_size=..., "
            "first_rank=..., host=...)), or under torchrun."
        )
    if nproc_per_node is not None and not _is_count(nproc_per_node):
        raise OptionsError(
            f"nproc_per_node={nproc_per_node!r} is not possible: it takes a whole number of at "
            "least 1."
        )
    with Session(nproc_per_node, backend=backend) as session:
        if _takes_local_rank(function, kwargs):
            return session.run(with_local_rank, function, *args, **kwargs)
        return session.run(function, *args, **kwargs)


def _takes_local_rank(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether it is made for launchers that give the local rank first, as ignite and flame do."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins do not tell
        return False
    first = next(iter(parameters.values()), None)
    if first is None or first.name != "local_rank" or "local_rank" in kwargs:
        return False
    places = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return first.kind in places and first.default is first.empty


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def start_training(
    function: Callable[..., T],
    options: LaunchOptions | None = None,
    /,
    *args: Any,
    **kwargs: Any,
) -> RankResults[T]:
    """Call a function as the options say: on ranks, or in this process.

    Where this host has only some of the ranks, those of all hosts form one process group by
    ``options.url``. Hangs across hosts are not diagnosed; Ctrl-C ends this host's ranks.

    Args:
        function: What to call. If its first parameter is named ``local_rank`` and has no default,
            it gets each rank's local rank there.
        options: How. Default: from the environment.
        *args: Its other positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The value of each rank of this host; of rank 0 where distribution is off.

    Raises:
        OptionsError: An option that cannot work here.
        LaunchError: The ranks did not start.
        RunError: The function raised on a rank of this host, which the message counts from 0.
        CollectiveError: It failed on another host.
    """
    options = LaunchOptions.from_environment() if options is None else options
    call: Callable[..., Any] = function
    takes_local_rank = _takes_local_rank(function, kwargs)
    if not options.distributed:
        return RankResults({0: function(*((0,) if takes_local_rank else ()), *args, **kwargs)})
    if takes_local_rank:
        call, args = with_local_rank, (function, *args)
    with Session(options.processes, backend=options.backend) as session:
        if options.world_size in (None, session.world_size):
            return session.run(call, *args, **kwargs)
        assert options.world_size is not None
        results = session.run(
            run_in_world,
            (call, args, kwargs),
            url=options.url,
            host=options.host,
            port=options.port,
            first_rank=options.first_rank,
            world_size=options.world_size,
        )
        if not all(is_complete for _, is_complete in results.values()):
            raise CollectiveError(
                "the function ended on all ranks of this host, but not on those of another host: "
                "the message there says why."
            )
        return RankResults(
            {options.rank_of(process): value for process, (value, _) in results.items()},
            duration=results.duration,
            durations={options.rank_of(p): s for p, s in results.durations.items()},
        )
