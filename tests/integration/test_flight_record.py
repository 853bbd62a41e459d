"""torch's analysis of flight records reads the session's own, and finds what is wrong."""

from __future__ import annotations

import importlib.util
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsession import CollectiveHangError, RunError, Session

ANALYSIS = "torch.distributed.flight_recorder"

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec(ANALYSIS) is None, reason="this torch has it elsewhere"
    ),
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(4, backend="gloo") as made:
        yield made


def analysed(session: Session, folder: Path, *options: str) -> str:
    """What torch says of the last cell."""
    session.timeline().save_flight_record(folder)
    done = subprocess.run(
        [sys.executable, "-m", f"{ANALYSIS}.fr_trace", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def collectives(session: Session, folder: Path) -> list[tuple[str, bool]]:
    """The operations that torch pairs, and whether each is as it should be."""
    analysed(session, folder, "-o", str(folder.parent / "found"))
    _, found = pickle.loads((folder.parent / "found").read_bytes())
    return [(each.collective_name, each.pass_check) for each in found.collectives]


RIGHT = """
t, parts = torch.ones(2, 3), [torch.zeros(2, 3) for _ in range(4)]
wide = torch.zeros(8, 3)
dist.all_reduce(t)
dist.broadcast(t.to(torch.float64), 1)
dist.reduce(t, 2)
dist.all_gather(parts, t)
dist.all_gather_into_tensor(wide, t)
dist.reduce_scatter(t, parts)
dist.reduce_scatter_tensor(t, wide)
dist.gather(t, parts if rank == 3 else None, dst=3)
dist.scatter(t, parts if rank == 0 else None, src=0)
splits = [1, 2, 3, 4][rank:] + [1, 2, 3, 4][:rank]
dist.all_to_all_single(torch.zeros(10), torch.ones(10), splits, splits)
dist.barrier()
work = dist.all_reduce(t, async_op=True)
work.wait()
half = dist.new_group([0, 1]), dist.new_group([2, 3])
for _ in range(3):
    dist.all_reduce(torch.ones(4, dtype=torch.int64), group=half[rank // 2])
if rank in (0, 3):
    dist.send(torch.ones(5), {0: 3, 3: 0}[rank]) if rank == 0 else dist.recv(torch.ones(5), 0)
    dist.recv(torch.ones(6), 3) if rank == 0 else dist.send(torch.ones(6), 0)
objects = [None] * 4
dist.all_gather_object(objects, "x")
"""


def test_a_right_program_has_all_operations_paired(session: Session, tmp_path: Path) -> None:
    session.execute(RIGHT)
    found = collectives(session, tmp_path / "dump")
    wrong = [name for name, is_right in found if not is_right]
    assert not wrong
    names = [name.removeprefix("gloo:") for name, _ in found]
    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "gather"):
        assert name in names
    for name in ("reduce_scatter", "_reduce_scatter_base", "scatter", "all_to_all", "barrier"):
        assert name in names
    assert names.count("all_reduce") == 2 + 2 * 3
    assert sum("->" in name or "<-" in name for name in names) == 2
    assert "Not all ranks" not in analysed(session, tmp_path / "dump")


def test_the_rank_that_did_not_come_is_named(session: Session, tmp_path: Path) -> None:
    with pytest.raises(CollectiveHangError):
        session.execute(
            "dist.all_reduce(torch.ones(3))\nif rank != 2: dist.broadcast(torch.ones(7), 0)",
            label="In[9]",
        )
    text = analysed(session, tmp_path / "dump")
    assert "Not all ranks joining collective" in text
    assert "collective: gloo:broadcast" in text
    assert "missing ranks: {2}" in text
    assert "input sizes: [[7]]" in text
    assert "collective state: started" in text
    assert "<module> at In[9]:2" in text


def test_what_differs_between_ranks_is_named(session: Session, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        session.execute("dist.all_reduce(torch.ones(3 if rank != 1 else 4))")
    text = analysed(session, tmp_path / "dump")
    assert re.search(r"Culprit rank \d; Error type: SIZE_OR_SYNTAX_MISMATCH, .*\[\[4\]\]", text), (
        text
    )
    with pytest.raises(RunError):
        session.execute(
            "dist.all_reduce(torch.ones(3)) if rank != 3 else dist.reduce(torch.ones(3), 0)"
        )
    text = analysed(session, tmp_path / "dump")
    # The analysis takes the rank of the first file for right, and the folder says which that is.
    ours = {"'reduce'", "'all_reduce'"}
    assert ours <= set(re.findall(r"collective type: (\S+)", text)), text


def test_messages_from_any_source_are_left_out(session: Session, tmp_path: Path) -> None:
    session.execute(
        "if rank == 0: dist.recv(torch.ones(2))\nif rank == 1: dist.send(torch.ones(2), 0)\n"
        "dist.barrier()"
    )
    assert collectives(session, tmp_path / "dump") == [("gloo:barrier", True)]


def test_the_record_of_the_ranks_that_are_left_is_read(session: Session, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        session.execute(
            "dist.barrier()\nif rank == 3: import os; os._exit(1)\ndist.all_reduce(torch.ones(3))"
        )
    text = analysed(session, tmp_path / "dump", "--allow-incomplete-ranks")
    assert not (tmp_path / "dump" / "rank_3").exists()
    assert "Traceback" not in text
    session.restart([3])
