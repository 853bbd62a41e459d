"""Code that catches every interrupt is ended all the same."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import _pytest
import hypothesis
import pluggy
import pytest

import tests.until
from distsession.engine import forced_end
from distsession.engine.forced_end import ForcedEnd
from tests.until import LIMIT_S

CATCHES = {
    "KeyboardInterrupt": "try: work()\nexcept KeyboardInterrupt: pass",
    "BaseException": "try: work()\nexcept BaseException:\n    pass",
    "everything": "try: work()\nexcept: pass",
    "twice": "try:\n    try: work()\n    except BaseException: pass\nexcept BaseException: pass",
    "and keeps it": "try: work()\nexcept BaseException as error: kept.append(error)",
    "suppress": "with contextlib.suppress(BaseException): work()",
    "in a function": "def f():\n    try: work()\n    except BaseException: return\nf()",
    "finally": "def f():\n    while True:\n        try: work()\n        finally: continue\nf()",
    "continue": "try: work()\nexcept BaseException: continue",
}


@pytest.fixture(params=[True, False], ids=["signals", "no signals"])
def wakes(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether a handler of SIGINT is called, as on a rank; its code may have SIGINT ignored."""
    handler = (lambda *_: None) if request.param else signal.SIG_IGN
    before = signal.signal(signal.SIGINT, handler)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("work", ["time.sleep(0.02)", "sum(range(1000))"], ids=["sleep", "count"])
@pytest.mark.parametrize("how", CATCHES)
def test_a_loop_that_catches_it_ends(
    how: str, work: str, wakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _raised_in(how, work, monkeypatch) is ForcedEnd
    for _ in range(3):  # and nothing is left of it
        time.sleep(0.01)


def test_a_wait_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)
    began = time.monotonic()
    assert _raised_in("everything", f"time.sleep({LIMIT_S})", monkeypatch) is ForcedEnd
    assert time.monotonic() - began < LIMIT_S
    signal.signal(signal.SIGINT, before)


def test_it_is_not_raised_in_the_midst_of_our_modules(
    wakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = 0

    def hold() -> None:
        nonlocal held
        held += 1
        for _ in range(1000):
            pass
        held -= 1

    for _ in range(5):
        assert _raised_in("everything", "hold()", monkeypatch, hold=hold) is ForcedEnd
        assert not held


@dataclasses.dataclass
class Slow:
    """Its ``__init__`` is generated, and so is that of what it keeps."""

    pair: Pair = dataclasses.field(default_factory=lambda: Pair(1, 2))


class Pair(NamedTuple):
    first: int
    second: int


def test_it_is_not_raised_in_generated_code_of_our_modules(
    wakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = 0

    def hold() -> None:
        nonlocal held
        held += 1
        for _ in range(300):
            Slow()
        held -= 1

    for _ in range(5):
        assert _raised_in("everything", "hold()", monkeypatch, hold=hold) is ForcedEnd
        assert not held


def test_it_is_not_raised_in_the_midst_of_pythons_own_modules(
    wakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A condition that is left locked would make whoever notifies it wait for ever."""
    condition = threading.Condition(threading.Lock())

    def work() -> None:
        for _ in range(100):
            with condition:
                pass

    for _ in range(5):
        assert _raised_in("everything", "hold()", monkeypatch, hold=work) is ForcedEnd
        assert condition.acquire(blocking=False)
        condition.release()


@pytest.mark.parametrize("goes_on", [False, True], ids=["handlers follow", "code goes on"])
@pytest.mark.parametrize(
    "code", [os.walk(".").gi_frame, eval(compile("(0 for _ in [])", "In[2]", "eval")).gi_frame],
    ids=["of Python's", "of the user's"],
)  # fmt: skip
def test_only_what_goes_on_can_be_held_up(
    code: FrameType, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine handlers may follow each other, and each last long."""
    monkeypatch.setattr(forced_end, "_is_begun", True)
    monkeypatch.setattr(forced_end, "_seen", None)
    monkeypatch.setattr(forced_end, "_raise_on_next_line", lambda frame: time.sleep(0.1))
    with pytest.raises(ForcedEnd) if goes_on else contextlib.nullcontext():
        for _ in range(8):
            forced_end.on_signal(signal.SIGINT, code)
            time.sleep(0.1 if goes_on else 0)


@pytest.mark.parametrize("wait", ["queue.Queue().get()", "threading.Event().wait()"])
def test_it_is_raised_where_pythons_own_modules_wait(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: None)
    namespace = {"queue": queue, "threading": threading}
    assert _raised_in("everything", wait, monkeypatch, **namespace) is ForcedEnd
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_the_handler_of_the_users_is_there_again(
    handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, handler)
    assert _raised_in("everything", "sum(range(1000))", monkeypatch) is ForcedEnd
    assert signal.signal(signal.SIGINT, before) == handler


def test_a_handler_that_user_code_has_found_meanwhile_is_that_from_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    work = "signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT)); time.sleep(0.001)"
    assert _raised_in("everything", work, monkeypatch, signal=signal) is ForcedEnd
    came.clear()
    forced_end.on_signal(signal.SIGINT, None)
    assert came == [signal.SIGINT]
    signal.signal(signal.SIGINT, before)


def _raised_in(
    how: str, work: str, monkeypatch: pytest.MonkeyPatch, **names: Any
) -> type[BaseException] | None:
    """What ends a loop that does this work, and catches errors of it so."""
    # On a rank, this package runs the code. Here pytest does, and the garbage collector calls
    # hypothesis, from where an exception cannot reach the loop.
    modules = (_pytest, pytest, pluggy, hypothesis)
    packages = [os.path.dirname(module.__file__) for module in modules]
    monkeypatch.setattr(
        forced_end, "_OWN", (*forced_end._OWN, __file__, tests.until.__file__, *packages)
    )
    body = "\n".join(f"    {line}" for line in CATCHES[how].splitlines())
    code = compile(f"begun.set()\nwhile True:\n{body}", "In[2]", "exec")
    begun, ended = threading.Event(), threading.Event()
    namespace: dict[str, Any] = {"begun": begun, "kept": [], "time": time, **names}
    exec(compile(f"import contextlib\ndef work():\n    {work}", "In[1]", "exec"), namespace)
    main = threading.main_thread().ident
    assert main is not None

    def force() -> None:
        begun.wait(LIMIT_S)
        while forced_end.force(lambda: not ended.is_set()):
            signal.pthread_kill(main, signal.SIGINT)
            ended.wait(0.1)

    forcing = threading.Thread(target=force)
    forcing.start()
    raised = None
    try:
        exec(code, namespace)
    except BaseException as error:
        raised = type(error)
    finally:
        ended.set()
        forced_end.end()
    forcing.join()
    return raised
