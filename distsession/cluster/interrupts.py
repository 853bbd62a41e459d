"""Work that Ctrl-C must not leave half done."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, TracebackType

__all__ = ["InterruptHold", "interrupts_held"]


def _plain_signals() -> ModuleType:
    """What ``signal`` is made of, without the enums that it makes of all it takes and gives.

    They would take a twentieth of an empty call.
    """
    try:
        return importlib.import_module("_signal")
    except ImportError:  # it is not public
        return signal


_signals = _plain_signals()


@contextmanager
def interrupts_held(
    hurry: Callable[[], object] = lambda: None, *, forget: bool = False
) -> Iterator[None]:
    """Let a Ctrl-C in the main thread wait until a block is over.

    Args:
        hurry: Called for each Ctrl-C meanwhile, so that the block can come to its end at once.
        forget: Do not pass it on afterwards: the interpreter ends anyway.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or _signals.getsignal(_signals.SIGINT) is None  # it is not Python's, and cannot be put back
    ):
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True
        hurry()

    before = _signals.signal(_signals.SIGINT, note)
    try:
        yield
    finally:
        _signals.signal(_signals.SIGINT, _signals.SIG_IGN if forget else before)
        if came and not forget:
            _signals.raise_signal(_signals.SIGINT)


class InterruptHold:
    """Lets a Ctrl-C wait from the moment a request is sent until somebody waits for it.

    Who waits knows how to stop it. One that came in between would leave it to run on its ranks with
    nobody who knows of it. Used as a context, whose end lets go, too.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> InterruptHold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def hold(self) -> None:
        """A Ctrl-C waits from here on."""
        self._stack.enter_context(interrupts_held())

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
        self._stack.close()
