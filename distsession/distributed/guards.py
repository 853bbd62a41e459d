"""Code that only some ranks run, or that one runs first.

When the body raises, its rank tells the others before it goes on, so that nobody is left waiting:
they get an error that names the rank and what it raised. Ctrl-C is not told: it reaches every rank
on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from distsession.distributed import rank_info
from distsession.distributed.objects import all_gather_object
from distsession.errors import CollectiveError, OptionsError

__all__ = ["one_rank_first", "one_rank_only", "run_local_rank_zero_first"]


class _OneRankOnly:
    def __init__(self, rank: int, with_barrier: bool):
        self._rank = rank
        self._with_barrier = with_barrier

    def __enter__(self) -> bool:
        return rank_info.get_rank() == self._rank

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._with_barrier:
            _report(error, "one_rank_only")

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def on_one_rank(*args: Any, **kwargs: Any) -> Any:
            with self as mine:
                return function(*args, **kwargs) if mine else None

        return on_one_rank


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> _OneRankOnly:
    """Run something on one rank only.

    As a decorator, or as a context manager that says whether this is the rank::

        @one_rank_only(with_barrier=True)
        def save(path): ...

        with one_rank_only() as mine:
            if mine:
                save(path)

    Args:
        rank: Which one. Where there is no such rank, nobody runs it.
        with_barrier: The others wait until it is done.

    Returns:
        The guard. A function decorated with it returns its value on that rank, None on the others.

    Raises:
        OptionsError: ``rank`` is no number: the decorator was used without parentheses.
        CollectiveError: With ``with_barrier``, on the other ranks: the body has raised. On its own
            rank its exception passes.
    """
    _check_rank(rank, "one_rank_only")
    return _OneRankOnly(rank, with_barrier)


class _OneRankFirst:
    def __init__(self, rank: int, local: bool):
        self._rank = rank
        self._local = local

    def _is_first(self) -> bool:
        return (rank_info.get_local_rank() if self._local else rank_info.get_rank()) == self._rank

    def __enter__(self) -> None:
        size = rank_info.get_local_world_size() if self._local else rank_info.get_world_size()
        if not 0 <= self._rank < size:
            what = "local ranks" if self._local else "ranks"
            raise OptionsError(f"one_rank_first(rank={self._rank}): {what} are 0 to {size - 1}.")
        if not self._is_first():
            _report(None, "one_rank_first")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._is_first():
            _report(error, "one_rank_first")

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def one_first(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return one_first


def one_rank_first(rank: int = 0, local: bool = False) -> _OneRankFirst:
    """Run something on one rank, then on the others: a download, then its use.

    As a decorator or as a context manager. Every rank of the world has to come here.

    Args:
        rank: Which one.
        local: It is a local rank: on each host one rank is first. The others go on when it is
            done on every host.

    Returns:
        The guard.

    Raises:
        OptionsError: There is no such rank; or ``rank`` is no number, since the decorator was used
            without parentheses.
        CollectiveError: On the other ranks: the first one has raised. They do not run the body.
    """
    _check_rank(rank, "one_rank_first")
    return _OneRankFirst(rank, local)


def run_local_rank_zero_first() -> _OneRankFirst:
    """The same as ``one_rank_first(0, local=True)``, by the name that composer has for it."""
    return _OneRankFirst(0, local=True)


def _check_rank(rank: Any, guard: str) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise OptionsError(f"rank={rank!r} is not a rank: use it as @{guard}().")


def _report(error: BaseException | None, guard: str) -> None:
    """Meet the other ranks, and tell them what this one has raised.

    Raises:
        CollectiveError: Another rank has raised.
    """
    if rank_info.get_world_size() == 1 or isinstance(error, KeyboardInterrupt):
        return
    mine = None if error is None else f"{type(error).__name__}: {_words(error)}"
    gathered = all_gather_object(mine)
    if error is not None:
        return  # it passes by itself
    for rank, text in enumerate(gathered):
        if text is not None:
            raise CollectiveError(f"rank {rank} raised in {guard}: {text}")


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception's own words are the user's code
        return "(it cannot be shown)"
