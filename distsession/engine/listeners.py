"""What each part of a rank does when a request begins, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distsession.protocol.messages import CallRequest, CellRequest, Request

__all__ = ["RequestListener", "is_run", "name_of", "told"]


_RUNS = CellRequest, CallRequest  # a union would be made anew each time


class RequestListener:
    """A part of a rank that keeps something by request; each overrides what concerns it.

    Listeners are told of a begin in their order, and of ends in the reverse order.
    """

    def begin_request(self, request: Request) -> None:
        """The request begins here."""

    def end_code(self, request: Request, error: BaseException | None) -> None:
        """The user's code is over, with this error if any; the answer is put together next."""

    def end_request(self, request: Request) -> None:
        """The answer is ready."""


def told(listeners: Iterable[RequestListener], name: str) -> tuple[Callable[..., Any], ...]:
    """The methods of this name, of those listeners that have one of their own."""
    nothing = getattr(RequestListener, name)
    return tuple(getattr(each, name) for each in listeners if getattr(type(each), name) != nothing)


def is_run(request: Request) -> bool:
    """Whether it runs code of the user's."""
    return isinstance(request, _RUNS)


def name_of(request: Request) -> str:
    """The cell or the function that it runs; empty where it runs none."""
    if isinstance(request, CellRequest):
        return request.label
    return request.name if isinstance(request, CallRequest) else ""
