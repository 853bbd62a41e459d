"""Handlers of signals that user code has set: what they raise reaches user code, and nothing else.

torch's ``DataLoader`` raises in its handler of SIGCHLD when a worker has died, and a handler of
SIGALRM ends what takes too long. Python runs a handler in whatever the main thread runs, which may
as well be the rank's own wait for the next request, or its report of an error. There nobody could
catch what is raised, the rank would end, and its variables with it. So each handler is wrapped when
it is set. ``signal.getsignal`` gives it as it was, for code that chains handlers or compares them.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distsession.engine.failure import message_of
from distsession.engine.listeners import RequestListener, is_run
from distsession.protocol.messages import Request

__all__ = ["UserHandlers"]

MAX_SHOWN = 3
"""How many different errors of handlers are told; the others are counted."""
MAX_TEXT = 300
"""Characters of one of them."""

_native_signal, _native_getsignal = signal.signal, signal.getsignal


class _Wrapped:
    """A handler as Python has it.

    Args:
        handler: As the user has set it.
        call: Calls it.
    """

    def __init__(self, handler: Callable[..., Any], call: Callable[..., None]):
        self.handler = handler
        self._call = call

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._call(self.handler, number, frame)


class UserHandlers(RequestListener):
    """All handlers that are set from the installation on.

    Args:
        ends: What ends this process and is passed on from wherever it is raised.
        terminate: The handler of SIGTERM of this process, for one of the user's that raises.
        is_child: Whether this process has been forked from the rank: it is left alone.
    """

    def __init__(
        self,
        ends: type[BaseException],
        terminate: Callable[[int, FrameType | None], None],
        is_child: Callable[[], bool],
    ):
        self._ends = ends
        self._terminate = terminate
        self._is_child = is_child
        self._is_user_code = False
        self._count = 0
        self._texts: list[str] = []

    def install(self) -> None:
        """Stand before Python's two functions.

        The rank's own handler of SIGINT, which code may have found and put back, is set as it is:
        one that it lets pass would come again in the frames around it, and be raised too soon.
        """
        own = _native_getsignal(signal.SIGINT)

        @functools.wraps(_native_signal)
        def set_handler(number: int, handler: Any) -> Any:
            is_set = isinstance(handler, _Wrapped | signal.Handlers) or handler == own
            if callable(handler) and not is_set:
                handler = _Wrapped(handler, self._call)
            return _unwrapped(_native_signal(number, handler))

        @functools.wraps(_native_getsignal)
        def get_handler(number: int) -> Any:
            return _unwrapped(_native_getsignal(number))

        module: Any = signal
        module.signal, module.getsignal = set_handler, get_handler

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Code of the user's runs within, and gets what a handler raises."""
        before, self._is_user_code = self._is_user_code, True
        try:
            yield
        finally:
            self._is_user_code = before

    def _call(self, handler: Callable[..., Any], number: int, frame: FrameType | None) -> None:
        if self._is_user_code or self._is_child():
            handler(number, frame)
            return
        try:
            handler(number, frame)
        except self._ends:
            raise
        except BaseException as error:
            if number == signal.SIGTERM:
                self._terminate(number, frame)
            self._note(number, error)

    def _note(self, number: int, error: BaseException) -> None:
        """Its text, for the error itself would keep alive all that its frames have."""
        self._count += 1
        if len(self._texts) < MAX_SHOWN:
            what = ": ".join(filter(None, (type(error).__name__, message_of(error))))
            if len(what) > MAX_TEXT:
                what = f"{what[:MAX_TEXT]}..."
            self._texts.append(f"the handler of {signal.Signals(number).name} raised {what}")

    def begin_request(self, request: Request) -> None:
        """Tell with the next run what was raised before it."""
        if self._count and is_run(request):
            texts, more = self._texts, self._count - len(self._texts)
            self._texts, self._count = [], 0
            if more:
                texts.append(f"{more:,} more such errors")
            for text in texts:
                sys.stderr.write(f"while no code of yours ran here: {text}\n")


def _unwrapped(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Wrapped) else handler
