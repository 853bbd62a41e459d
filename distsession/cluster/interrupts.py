"""Work that Ctrl-C must not leave half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["interrupts_held"]


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
        or signal.getsignal(signal.SIGINT) is None  # it is not Python's, and cannot be put back
    ):
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True
        hurry()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if forget else before)
        if came and not forget:
            signal.raise_signal(signal.SIGINT)
