"""What is read from the texts of torch's and gloo's errors."""

from __future__ import annotations

import pytest

from distsession.engine.torch_errors import (
    Break,
    classify,
    is_from_gloo,
    is_wait_over,
    time_limit_s,
)

PAIR = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] "
BUFFER = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "


@pytest.mark.parametrize(
    ("text", "why", "limit_s"),
    [
        (f"{PAIR}Connection closed by peer [127.0.0.1]:1234", Break.CLOSED, 0.0),
        (f"{PAIR}Read error [127.0.0.1]:1: Connection reset by peer", Break.CLOSED, 0.0),
        (f"{PAIR}writev [127.0.0.1]:1: Broken pipe", Break.CLOSED, 0.0),
        (f"{BUFFER}Timed out waiting 5000ms for recv operation", Break.TIMED_OUT, 5.0),
        ("wait timed out after 300 ms", Break.TIMED_OUT, 0.3),
        (f"{PAIR}op.preamble.length <= op.nbytes. 16 vs 8", Break.OTHER, 0.0),
        ("Detected mismatch between collectives on ranks. Rank 0 is", Break.MISMATCH, 0.0),
        ("tensors must be contiguous", Break.OUTSIDE, 0.0),
        ("the file is closed", Break.OUTSIDE, 0.0),
    ],
)
def test_why_an_operation_broke_off(text: str, why: Break, limit_s: float) -> None:
    assert (classify(text), time_limit_s(text)) == (why, limit_s)


def test_what_came_from_gloo_is_known_wherever_it_is_raised_again() -> None:
    assert is_from_gloo(f"DataLoader: {PAIR}Connection closed by peer")
    assert not is_from_gloo("Connection closed by peer")


def test_a_wait_that_is_over_is_no_failure() -> None:
    assert is_wait_over(RuntimeError("[Gloo] Operation timed out!"))
    assert not is_wait_over(RuntimeError(f"{BUFFER}Timed out waiting 5000ms"))
