"""Where a session's error stands in for one of torch's, code that looks for torch's finds it."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsession import RunError, Session, errors
from tests.integration.torch_errors_programs import (
    DEATH,
    PROGRAMS,
    Caught,
    caught_here,
    other_rank_ends,
)

ROOT = Path(__file__).parents[2]
OURS = ("CollectiveHangError", "CollectiveError")


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Caught | None]]:
    """What the same programs come to in plain processes with the same torch."""
    command = [sys.executable, "-m", "tests.integration.torch_errors_programs", *PROGRAMS, *DEATH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Caught | None]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(2) as session:
        yield session


def words(text: str) -> str:
    """What code may look for: the first line without gloo's source, ports and names of keys."""
    text = re.sub(r"^\[\S*\.cc:\d+\] ", "", text.partition("\n")[0])
    text = re.sub(r" \[[\d.]+\]:\d+.*", "", text)
    text = re.sub("(recv|send) operation", "operation", text)  # either, as the algorithm has it
    return re.sub(r"keys: .*|after \d+ seconds|\d+ms", "", text)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_error_has_torchs_type_and_words(
    session: Session, plain: dict[str, list[Caught | None]], name: str
) -> None:
    ours = session.run(caught_here, name)
    if name == "begin_alone":  # it destroyed the group, and the next program is to begin in one
        session.evaluate("rank")  # this run has the group again
        session.reconnect()
    for rank, theirs in enumerate(plain[name]):
        mine = ours[rank]
        if theirs is None:
            assert mine is None
            continue
        assert mine is not None
        assert set(theirs[0]) <= set(mine[0]), (theirs, mine)
        for part in words(theirs[1]).split("  "):
            assert part in words(mine[1].replace("(torch: ", "")), (theirs[1], mine[1])
        assert not mine[1].startswith(("Timed out", "[Rank", "wait timeout")) or mine[0][0] not in (
            OURS
        )


def test_the_death_of_another_rank_is_a_closed_connection(
    plain: dict[str, list[Caught | None]],
) -> None:
    (theirs, _) = plain["other_rank_ends"]
    assert theirs is not None
    with Session(2) as session:
        with pytest.raises(RunError) as raised:
            session.run(other_rank_ends_and_tells)
        assert raised.value.results[0] == [True, "Connection closed by peer"]
    assert "Connection closed by peer" in theirs[1]


def other_rank_ends_and_tells() -> list[object]:
    import torch.distributed as dist

    try:
        other_rank_ends(dist.get_rank())
    except RuntimeError as error:
        text = str(error)
        ours, _, theirs = text.partition("(torch: ")
        return ["rank 1" in ours and "all_reduce" in ours, theirs.removesuffix(")")]
    return []


def test_the_kernel_gets_an_error_that_needs_no_torch(session: Session) -> None:
    with pytest.raises(RunError) as raised:
        session.execute(
            "from datetime import timedelta\n"
            "if rank == 0: dist.new_group([0, 1], timeout=timedelta(seconds=0.3))",
        )
    error = raised.value.by_rank[0]
    assert type(error) is errors.CollectiveHangError
    assert str(error).startswith("rank 1 did not come to new_group (ranks 0-1) within 0.3 s")
    assert "(torch: wait timeout after 300ms" in str(error)
    assert "(torch: " not in str(raised.value)
    assert type(pickle.loads(pickle.dumps(error))) is errors.CollectiveHangError
