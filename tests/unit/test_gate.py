"""A gate lets threads wait, and works on whatever is raised within it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from distsession.engine import gate as gate_module
from distsession.engine.gate import Gate
from tests.until import LIMIT_S

pytestmark = pytest.mark.timeout(60)
MOST_INSTRUCTIONS = 100


def test_whoever_waits_goes_on_when_it_is_opened() -> None:
    gate, passed = Gate(), threading.Semaphore(0)
    threads = [threading.Thread(target=lambda: gate.wait() and passed.release()) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not gate.wait(0.05)
    gate.open()
    gate.open()
    for thread in threads:
        thread.join(LIMIT_S)
        assert passed.acquire(timeout=LIMIT_S)
    assert gate.wait(0)
    gate.close()
    gate.close()
    assert not gate.wait(0)


@pytest.mark.parametrize("call", [Gate.open, Gate.close, Gate.wait])
def test_it_works_after_an_error_at_any_instruction(call: Callable[[Gate], Any]) -> None:
    for number in range(MOST_INSTRUCTIONS):
        gate = Gate()
        gate.open()
        if not raises_at(number, lambda gate=gate: call(gate)):  # type: ignore[misc]
            break
        done = threading.Event()
        thread = threading.Thread(
            target=lambda g=gate, d=done: (g.open(), g.wait(), g.close(), d.set()), daemon=True
        )
        thread.start()
        assert done.wait(LIMIT_S), number
        assert not gate.wait(0)
    assert 2 < number < MOST_INSTRUCTIONS - 1


def raises_at(number: int, call: Callable[[], object]) -> bool:
    """Call it, with an error at one of its instructions; whether it has so many."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != gate_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise InterruptedError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except InterruptedError:
        return True
    finally:
        sys.settrace(before)
    return False
