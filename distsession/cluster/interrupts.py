"""Work that Ctrl-C, or an alarm whose handler raises, must not leave half done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

__all__ = ["MAIN_THREAD", "InterruptHold", "interrupts_held"]

MAIN_THREAD = threading.main_thread().ident
"""Asked for several times in each call, which takes longer than all that depends on it."""

# Each call sets handlers twice. The functions of ``signal`` make an enum of every handler, which
# fails inside where it is a function, and takes ten times as long as what they call.
_get_handler, _set_handler = _signal.getsignal, _signal.signal

_held = 0
"""How many blocks the main thread is in that hold them."""


class interrupts_held:
    """Let a Ctrl-C in the main thread wait until a block is over.

    So does SIGALRM where it has a handler, by which programs end what takes them too long.

    Args:
        hurry: Called for each Ctrl-C meanwhile, so that the block can come to its end at once.
        forget: Do not pass it on afterwards: the interpreter ends anyway.
    """

    def __init__(self, hurry: Callable[[], object] | None = None, *, forget: bool = False):
        self._hurry, self._forget = hurry, forget
        self._came = self._rang = self._holds = False
        self._before: Any = None
        self._alarm: Any = None

    def __enter__(self) -> None:
        global _held
        if (
            threading.get_ident() != MAIN_THREAD
            or (_held and self._hurry is None and not self._forget)
            or _get_handler(signal.SIGINT) is None  # it is not Python's, and cannot be put back
        ):
            return
        if callable(alarm := _get_handler(signal.SIGALRM)):  # first: it may raise until then
            self._alarm = alarm
            _set_handler(signal.SIGALRM, self._note)
        self._before = _set_handler(signal.SIGINT, self._note)
        self._holds = True
        _held += 1

    def _note(self, number: int, _: object) -> None:
        if number == signal.SIGALRM:
            self._rang = True
        else:
            self._came = True
        if self._hurry is not None:
            self._hurry()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        global _held
        if not self._holds:
            return
        self._holds = False
        _held -= 1
        _set_handler(signal.SIGINT, _signal.SIG_IGN if self._forget else self._before)
        try:
            if self._alarm is not None:
                _set_handler(signal.SIGALRM, self._alarm)
            if self._rang:
                signal.raise_signal(signal.SIGALRM)
        finally:
            if self._came and not self._forget:
                signal.raise_signal(signal.SIGINT)


class InterruptHold:
    """Lets a Ctrl-C wait from the moment a request is sent until somebody waits for it.

    Who waits knows how to stop it. One that came in between would leave it to run on its ranks with
    nobody who knows of it. Used as a context, whose end lets go, too.
    """

    def __init__(self) -> None:
        self._held: interrupts_held | None = None
        self._then: Callable[[], None] | None = None

    def __enter__(self) -> InterruptHold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def hold(self, hurry: Callable[[], object] | None = None) -> None:
        """A Ctrl-C waits from here on.

        Args:
            hurry: Called for each Ctrl-C meanwhile.
        """
        if self._held is None:
            self._held = interrupts_held(hurry)
            self._held.__enter__()

    def then(self, end: Callable[[], None]) -> None:
        """Have this done when it lets go, before a Ctrl-C is raised."""
        self._then = end

    @contextmanager
    def released(self) -> Iterator[None]:
        """Within, a Ctrl-C is raised at once; afterwards it waits again."""
        try:
            self.release()  # may raise one that came before
            yield
        finally:
            self.hold()

    def release(self) -> None:
        """No longer; raises KeyboardInterrupt if one came meanwhile."""
        end, self._then = self._then, None
        if end is not None:
            end()
        held, self._held = self._held, None
        if held is not None:
            held.__exit__()
