"""Calls of what an exception of the user's brings with it: its text, its notes, what pickles it.

An error is put into words when the user's code is over. Nobody could catch there what such a method
raises, and nothing would end one that never returns: the rank would end or hang, and its variables
with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar
from weakref import WeakKeyDictionary

__all__ = ["CALL_LIMIT_S", "TakesTooLong", "guarded", "install"]

CALL_LIMIT_S = 3.0
"""Seconds that a method of an exception has."""
NOT_AGAIN_S = 60.0
"""Seconds for which a class is not asked again after one of its methods took longer."""

T = TypeVar("T")
Limit = Callable[[float], AbstractContextManager[None]]


class TakesTooLong(BaseException):
    """Raised in a method that does not come to its end."""


_limit: Limit = lambda seconds: contextlib.nullcontext()  # noqa: E731
_ends: type[BaseException] | tuple[()] = ()
_slow: WeakKeyDictionary[type, float] = WeakKeyDictionary()
"""When a method of a class took too long."""


def install(
    limit: Callable[[float], AbstractContextManager[None]], ends: type[BaseException]
) -> None:
    """Have a time limit for such calls, on a rank.

    Args:
        limit: Raises :class:`TakesTooLong` in what runs within for longer than these seconds.
        ends: What ends this process, and is passed on.
    """
    global _limit, _ends
    _limit, _ends = limit, ends


def guarded(
    call: Callable[[], T],
    instead: Callable[[BaseException], T],
    of: BaseException | None = None,
) -> T:
    """The result of a call, or something instead of it where it raises or takes too long.

    Args:
        call: Is called.
        instead: Gives it, from what was raised.
        of: The exception whose methods it calls; None where it calls none directly, so that there
            is no time limit either.
    """
    kind = None if of is None else type(of)
    try:
        if kind is None:
            return call()
        if time.monotonic() < _slow.get(kind, -NOT_AGAIN_S) + NOT_AGAIN_S:
            raise TakesTooLong
        with _limit(CALL_LIMIT_S):
            return call()
    except BaseException as error:
        if issubclass(type(error), _ends):
            raise
        if kind is not None and type(error) is TakesTooLong:
            _slow.setdefault(kind, time.monotonic())
        return instead(error)
