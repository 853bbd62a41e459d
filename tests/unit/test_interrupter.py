"""When Stop raises in a rank's main thread, and when it waits."""

from __future__ import annotations

import importlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType

import pytest

from distsession.engine import control
from distsession.engine.control import Interrupter
from distsession.engine.guarded import TakesTooLong
from distsession.kernel.recovery import _stuck_text
from distsession.protocol.messages import FrameInfo, RankReport
from distsession.protocol.rank_state import RankState

REQUEST = 7
PRESSES = """
import signal
signal.raise_signal(signal.SIGINT)
after = 1
"""


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    """One for which a thread repeats what it asks for, as the control thread does."""

    def repeat() -> None:
        while asked.get():
            while made.is_to_be_repeated:
                time.sleep(0.002)
                made.repeat()

    before = signal.getsignal(signal.SIGINT)
    made = Interrupter()
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a handler may put something in
    made.request_repeat = lambda: asked.put(True)
    thread = threading.Thread(target=repeat)
    thread.start()
    yield made
    asked.put(False)
    thread.join()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package in whose import a signal comes."""
    folder = tmp_path / "site-packages" / "pressed"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PRESSES)
    monkeypatch.syspath_prepend(str(folder.parent))
    yield "pressed"
    sys.modules.pop("pressed", None)


def test_a_request_that_is_meant_is_interrupted_once_and_no_other(
    interrupter: Interrupter,
) -> None:
    interrupter.target(REQUEST)
    with interrupter.user_code(REQUEST + 1):
        signal.raise_signal(signal.SIGINT)
    with interrupter.user_code(REQUEST):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not interrupter.is_pending
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_within_the_import_of_a_library_it_waits_for_the_end_of_that(
    interrupter: Interrupter, library: str
) -> None:
    interrupter.target(REQUEST)
    with interrupter.user_code(REQUEST):
        assert importlib.import_module(library).after == 1
        assert interrupter.is_pending
        with pytest.raises(KeyboardInterrupt):
            interrupter.repeat_held()
        assert not interrupter.is_pending
        interrupter.repeat_held()


def test_so_does_the_error_of_a_rank_that_is_freed(interrupter: Interrupter, library: str) -> None:
    with interrupter.user_code(REQUEST):
        with pytest.raises(ValueError, match="freed"):
            interrupter.raise_in_user_code(lambda: ValueError("freed"))
        interrupter._error = REQUEST, lambda: ValueError("freed again")
        assert importlib.import_module(library).after == 1
        with pytest.raises(ValueError, match="freed again"):
            interrupter.repeat_held()


def test_an_import_that_takes_too_long_is_cut_off(
    interrupter: Interrupter, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "IMPORT_GRACE_S", 0.0)
    interrupter.target(REQUEST)
    with interrupter.user_code(REQUEST), pytest.raises(KeyboardInterrupt):
        importlib.import_module(library)
    assert library not in sys.modules


def test_a_rank_that_does_not_come_back_from_an_import_is_said_to_import() -> None:
    frames = (
        FrameInfo("In[3]", 1, "<module>"),
        FrameInfo("<frozen importlib._bootstrap>", 1176, "_find_and_load"),
        FrameInfo("/env/lib/python3.12/site-packages/slow/__init__.py", 4, "<module>"),
    )
    report = RankReport(0, RankState.RUNNING, place="In[3] line 1", stack=frames)
    assert _stuck_text(report) == "imports something, which is not cut off, at In[3] line 1"
    assert "import" not in _stuck_text(replace(report, stack=frames[:1]))


CONTEXT = """
import contextlib, signal, time

state = []

def change():
    signal.raise_signal(signal.SIGINT)
    for _ in range(100):  # Python looks for signals in each round
        pass
    state.append("changed")

class Context:
    def __enter__(self):
        change()
    def __exit__(self, *_):
        change()

@contextlib.contextmanager
def generated():
    change()
    try:
        yield
    finally:
        change()

@contextlib.contextmanager
def waiting():
    yield
    time.sleep(20)
"""


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of a library. A signal comes as each of its contexts is entered and left."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "contexts.py").write_text(CONTEXT)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("contexts")
    sys.modules.pop("contexts", None)


@pytest.mark.parametrize("kind", ["Context", "generated"])
@pytest.mark.parametrize("is_left", [False, True], ids=["entered", "left"])
def test_a_context_of_a_library_is_entered_and_left_before_it(
    interrupter: Interrupter, context: ModuleType, kind: str, is_left: bool
) -> None:
    def use() -> None:
        with getattr(context, kind)():
            assert is_left
            interrupter.target(REQUEST)

    if not is_left:
        interrupter.target(REQUEST)
    with pytest.raises(KeyboardInterrupt), interrupter.user_code(REQUEST):
        use()
    assert context.state == ["changed"] * 2


def test_a_context_that_is_left_for_long_is_cut_off(
    interrupter: Interrupter, context: ModuleType
) -> None:
    """Such as that of an executor, which waits for all that was given to it."""

    def use() -> None:
        with context.waiting():
            threading.Timer(0.1, interrupter.interrupt, [REQUEST]).start()

    interrupter.target(REQUEST)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupter.user_code(REQUEST):
        use()
    assert time.monotonic() - began < 15


def test_what_shows_an_error_is_ended_when_it_takes_too_long(interrupter: Interrupter) -> None:
    with interrupter.user_code(REQUEST):
        pass
    began = time.monotonic()
    with pytest.raises(TakesTooLong), interrupter.limited(0.05):
        time.sleep(60)
    with interrupter.limited(60):
        pass
    assert time.monotonic() - began < 30
    signal.raise_signal(signal.SIGINT)  # reaches nothing


def test_a_stop_reaches_what_shows_the_error_of_its_request(interrupter: Interrupter) -> None:
    with interrupter.user_code(REQUEST):
        pass
    interrupter.target(REQUEST)

    def show() -> None:
        threading.Timer(0.1, interrupter.interrupt, [REQUEST]).start()
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), interrupter.limited(60):
        show()


def test_a_signal_that_comes_before_the_handler_has_ended_is_sent_again(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: a sleep that goes on once the handler has ended would last."""
    passes = interrupter._passes

    def slow(frame: FrameType | None) -> bool:
        found = passes(frame)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(interrupter, "_passes", slow)
    interrupter.target(REQUEST)
    threading.Timer(0.1, interrupter.interrupt, [REQUEST]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupter.user_code(REQUEST):
        time.sleep(20)
    assert time.monotonic() - began < 15


def test_a_signal_that_comes_as_a_thread_is_started_waits_for_no_lock(
    interrupter: Interrupter,
) -> None:
    starting = threading._active_limbo_lock  # type: ignore[attr-defined]  # Thread.start takes it
    interrupter.target(REQUEST)
    with pytest.raises(KeyboardInterrupt), interrupter.user_code(REQUEST), starting:
        signal.raise_signal(signal.SIGINT)


def test_what_python_swallows_comes_again(interrupter: Interrupter) -> None:
    requested = threading.Event()
    interrupter.target(REQUEST)
    with interrupter.user_code(REQUEST):
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(signal.SIGINT)
        interrupter.request_repeat = requested.set
        assert interrupter.is_swallowed(caught.value)
        assert not interrupter.is_swallowed(caught.value)
        assert requested.is_set()
        with pytest.raises(KeyboardInterrupt):
            interrupter.repeat()
        assert not interrupter.is_to_be_repeated


def test_a_repeat_for_an_earlier_request_reaches_no_later_one(interrupter: Interrupter) -> None:
    """One that is forced to end is a target, too."""
    interrupter.target(REQUEST)
    interrupter.target(REQUEST + 1)
    with interrupter.user_code(REQUEST + 1):
        interrupter.interrupt(REQUEST)
        assert interrupter.is_pending
        with pytest.raises(KeyboardInterrupt):
            interrupter.interrupt(REQUEST + 1)
