"""What is read from the texts of torch's and gloo's errors."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

from distsession.engine.torch_errors import (
    Break,
    classify,
    in_torchs_place,
    is_from_gloo,
    is_wait_over,
    monitored_text,
    stand_in,
    time_limit_s,
    without_log_header,
)
from distsession.errors import CollectiveError, CollectiveHangError

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


def test_an_error_in_torchs_place_is_of_both_types_and_travels_as_ours() -> None:
    error = CollectiveHangError("rank 1 did not come.", remedy="Wait.")
    error.args_kept = 3  # type: ignore[attr-defined]
    in_torchs_place(error, "wait timeout", dist.DistNetworkError)
    in_torchs_place(error, "wait timeout after 3ms", dist.DistStoreError)
    assert isinstance(error, dist.DistStoreError)
    assert not isinstance(error, dist.DistNetworkError)
    assert isinstance(error, CollectiveHangError)
    assert type(error).__name__ == "CollectiveHangError"
    assert str(error) == "rank 1 did not come. Wait. (torch: wait timeout after 3ms)"
    assert error.lines == ("rank 1 did not come. Wait.",)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CollectiveHangError
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert b"torch.distributed" not in pickle.dumps(error)


@pytest.mark.parametrize(
    ("error", "is_gloo", "kind", "text"),
    [
        (CollectiveHangError("x"), True, RuntimeError, "Timed out waiting 1500ms for recv oper"),
        (CollectiveError("x"), True, RuntimeError, "Connection closed by peer"),
        (CollectiveHangError("x"), False, dist.DistBackendError, "Watchdog caught collective"),
        (CollectiveError("x"), False, dist.DistBackendError, "NCCL communicator was aborted on"),
    ],
)
def test_what_stands_in_for_an_operation_that_breaks_off(
    error: CollectiveError, is_gloo: bool, kind: type[Exception], text: str
) -> None:
    stand_in(error, name="all_reduce", sequence=4, limit_s=1.5, rank=1, is_gloo=is_gloo)
    assert isinstance(error, kind)
    assert text in error.torch_text


def test_a_monitored_barrier_names_whom_torch_names() -> None:
    one = monitored_text(0, [1, 3], 2.0, all_ranks=False)
    assert one == "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms"
    both = monitored_text(0, [1, 3], 2.0, all_ranks=True)
    assert both == "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms"
    assert monitored_text(3, [0], 2.0, all_ranks=True).startswith("Rank 3 successfully reached")
    none = monitored_text(0, [1], 0.0, all_ranks=False)
    assert none == "Rank 0 timed out in monitoredBarrier after 0 ms."


def test_the_header_of_a_log_is_left_out() -> None:
    said = "Check failed: outputShape[0] * worldSize == inputShape[0] (8 vs. 7)"
    header = "[rank0]:[F1128 11:13:41.612383182 ProcessGroupGloo.cpp:1537] "
    assert without_log_header(f"{header}{said}") == said
    assert without_log_header(f"[rank0] {said}") == f"[rank0] {said}"
