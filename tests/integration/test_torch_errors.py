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
    told = done.stdout.splitlines()[-1]  # before it come lines of gloo, up to torch 2.10
    found: dict[str, list[Caught | None]] = json.loads(told)
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


WRONG_SPLITS = {
    "a sum": (4, 4, [1] * 4, [1, 1, 1, 3], "Split sizes doesn't match total dim 0 size"),
    "what is received": (4, 4, [2] * 4, [1] * 4, "Split sizes doesn't match total dim 0 size"),
    "a number": (4, 4, [1] * 4, [1] * 3, "Number of tensor splits not equal to group size"),
    "an input": (5, 4, None, None, "Tensor's dim 0 does not divide equally across group size"),
    "an output": (4, 5, None, None, "Tensor's dim 0 does not divide equally across group size"),
}


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    with Session(4, backend="gloo") as session:
        yield session


@pytest.mark.parametrize("wrong", WRONG_SPLITS.values(), ids=WRONG_SPLITS)
@pytest.mark.parametrize("catches", [True, False])
def test_splits_that_one_rank_refuses_move_no_later_operation(
    four: Session, catches: bool, wrong: tuple[int, int, list[int] | None, list[int] | None, str]
) -> None:
    entered, received, receive, send, text = wrong
    call = (
        f"dist.all_to_all_single(torch.ones({received}), torch.ones({entered}), {receive}, {send})"
    )
    caught = f"try: {call}\n    except RuntimeError as error: text = str(error)"
    right = "dist.all_to_all_single(out, torch.ones(4), [1] * 4, [1] * 4)"
    code = (
        f"text, out = '', torch.zeros(4)\nif rank == 1:\n    {caught if catches else call}\n{right}"
    )
    if catches:
        four.execute(code, timeout=60)
        assert four[1].evaluate("text")[1] == text
        assert four.evaluate("out.tolist()") == dict.fromkeys(range(4), [1.0] * 4)
    else:
        with pytest.raises(RunError, match=re.escape(text)):
            four.execute(code, timeout=60)
    four.execute("total = torch.ones(1)\ndist.all_reduce(total)", timeout=60)
    assert four.evaluate("total.item()") == dict.fromkeys(range(4), 4.0)
