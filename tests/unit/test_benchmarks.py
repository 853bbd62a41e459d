"""What the benchmarks say about the ends of what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsession.messages import Text
from distsession.view import Output
from tests.benchmarks import bench as bench_module
from tests.benchmarks import starts
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import NotInstalled, take_turns
from tests.benchmarks.output import Counter
from tests.benchmarks.processes import Snapshot


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    nothing = Snapshot(frozenset(), frozenset())
    monkeypatch.setattr(starts, "snapshot", lambda: nothing)
    monkeypatch.setattr(bench_module, "end_leftovers", lambda grace, keep: ["sleep 60"])
    monkeypatch.setattr(bench_module, "session_folders", set)
    return Bench(2, True, tmp_path)


def test_a_peer_that_is_not_installed_has_no_end(bench: Bench) -> None:
    def measure() -> float:
        raise NotInstalled("not installed")

    arm = starts._arm(bench, "peer", measure)
    take_turns([arm], 2)
    assert (arm.note, arm.failed) == ("not installed", False)
    assert (bench.ends, bench.left_behind()) == ({}, [])


def test_every_start_has_an_end_also_one_that_failed(bench: Bench) -> None:
    outcomes = iter([1.0, RuntimeError("no")])

    def measure() -> float:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    arm = starts._arm(bench, "peer", measure)
    take_turns([arm], 2)
    assert (arm.rounds, arm.note) == ([(1.0,)], "failed: RuntimeError: no")
    assert bench.ends == {"peer": 2}
    [row] = bench.left_behind()
    assert row.note == "in all, after 2 ends; sleep 60"
    assert row.figure is not None
    assert row.figure.values == (2.0,)


def test_a_session_can_write_all_that_it_has_to_say_to_the_counter() -> None:
    counter: Output = Counter()
    for name in [name for name in vars(Output) if not name.startswith("_")]:
        assert callable(getattr(counter, name))
    counter.notify("rank 1 waits")
    counter.write(Text(0, 0, "stdout", "a\nb\n"))
    assert counter.lines == 2
