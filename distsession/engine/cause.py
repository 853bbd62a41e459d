"""Why an operation broke off, told by its exception as data.

Texts and classes do not say who is to blame: code of the user may catch an error and raise another
one, and C++ code between makes a ``RuntimeError`` of any. So a reason is attached to the exception
when it is made, is found again in whatever is raised on top of it, and travels with the reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from distsession.engine.guarded import guarded
from distsession.engine.torch_errors import is_from_gloo
from distsession.protocol.messages import Abort, Aborted, Reason

__all__ = ["attach", "chain", "find", "find_handled", "has_reason"]

E = TypeVar("E", bound=BaseException)

_NAME = "_distsession_reason"
_LONGEST_CHAIN = 50
_DEEPEST_GROUP = 8


def attach(error: E, reason: Reason) -> E:
    """Let an exception carry why an operation broke off."""
    setattr(error, _NAME, reason)
    return error


def has_reason(error: BaseException) -> bool:
    """Whether this exception itself carries a reason."""
    return _attached(error) is not None


def _attached(error: BaseException) -> Reason | None:
    """What :func:`attach` has given it; asks none of its own methods."""
    reason: Reason | None = object.__getattribute__(error, "__dict__").get(_NAME)
    return reason


def find(error: BaseException, abort: Abort | None = None) -> Reason | None:
    """The reason of an exception, or of one that it was raised on top of.

    Args:
        error: What ended the user's code.
        abort: What the process group was given up for, if it was. An exception that only repeats
            it, as C++ code does, is one of those that suffered.
    """
    return guarded(lambda: _find(error, abort, 0), lambda _: None)


def _find(error: BaseException, abort: Abort | None, depth: int) -> Reason | None:
    parts = chain(error)
    return next((reason for part in parts if (reason := _own(part, abort, depth))), None)


def find_handled(error: BaseException, abort: Abort | None = None) -> BaseException | None:
    """What was being handled when an operation broke off: an error of the code's own.

    Such as what a ``finally`` or an ``__exit__`` cleans up after, with a collective that the other
    ranks do not come to.

    Args:
        error: What ended the user's code, which has a reason.
        abort: As in :func:`find`.
    """
    return guarded(lambda: _find_handled(error, abort), lambda _: None)


def _find_handled(error: BaseException, abort: Abort | None) -> BaseException | None:
    parts = chain(error)
    if not any(_own(part, abort) is not None for part in parts):
        return None
    return next((part for part in parts if _own(part, abort) is None), None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those before it, newest first."""
    seen: set[int] = set()
    part: BaseException | None = error
    while part is not None and id(part) not in seen and len(seen) < _LONGEST_CHAIN:
        seen.add(id(part))
        yield part
        if part.__cause__ is not None:
            part = part.__cause__
        elif part.__suppress_context__ and has_reason(part) and part.__context__ is not None:
            part = part.__context__.__context__  # it stands for the one that torch raised
        else:
            part = part.__context__


def _own(error: BaseException, abort: Abort | None, depth: int = 0) -> Reason | None:
    reason = _attached(error)
    if reason is not None:
        return reason
    if isinstance(error, BaseExceptionGroup):
        if depth >= _DEEPEST_GROUP:
            return None
        first = None
        for part in {id(part): part for part in error.exceptions}.values():
            found = _find(part, abort, depth + 1)
            if found is None:
                return None
            first = first or found
        return first
    if abort is not None and isinstance(error, RuntimeError):
        text = guarded(lambda: str(error), lambda _: "", error)
        repeats = (bool(text and abort.text) and abort.text in text) or is_from_gloo(text)
        return Aborted() if repeats else None
    return None
