"""What the benchmarks make of what they measure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from distsession.kernel.output import Notice
from distsession.protocol.messages import Text
from distsession.view import Output
from tests.benchmarks import bench as bench_module
from tests.benchmarks import many, processes, recovery, starts
from tests.benchmarks.__main__ import main
from tests.benchmarks.bench import Bench
from tests.benchmarks.calls import rows_beside_raw
from tests.benchmarks.figures import Arm, NotInstalled, take_turns
from tests.benchmarks.markdown import BEGIN, END, LINES, markdown
from tests.benchmarks.output import Counter
from tests.benchmarks.processes import Snapshot, program, run_program
from tests.until import until


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

    arm = starts.swept_arm(bench, "peer", measure)
    take_turns([arm], 2)
    assert (arm.note, arm.failed) == ("not installed", False)
    assert (bench.ends, bench.left_behind()) == ({}, [])


def commands(pid: int) -> list[str]:
    """The commands that the children of a process run."""
    return [" ".join(process.cmdline()) for process in psutil.Process(pid).children()]


def test_what_one_that_stays_starts_later_is_not_left_behind() -> None:
    later = "import subprocess; input(); subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", later], stdin=subprocess.PIPE) as stays:
        before = processes.snapshot()
        with subprocess.Popen(["sleep", "61"]) as left:
            assert stays.stdin is not None
            stays.stdin.write(b"\n")
            stays.stdin.flush()
            until(lambda: commands(stays.pid) == ["sleep 60"])
            of_it = psutil.Process(stays.pid).children()
            assert processes.end_leftovers(0.0, keep=before.pids) == ["sleep 61"]
            assert not psutil.pid_exists(left.pid)
        assert of_it[0].is_running()
        found = processes.end_leftovers(0.0, keep=before.pids - {stays.pid})
        assert sorted(found) == [" ".join([sys.executable, "-c", later]), "sleep 60"]


def test_every_start_has_an_end_also_one_that_failed(bench: Bench) -> None:
    outcomes = iter([1.0, RuntimeError("no")])

    def measure() -> float:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    arm = starts.swept_arm(bench, "peer", measure)
    take_turns([arm], 2)
    assert (arm.rounds, arm.note) == ([(1.0,)], "failed: RuntimeError: no")
    assert bench.ends == {"peer": 2}
    [row] = bench.left_behind()
    assert row.note == "in all, after 2 ends; sleep 60"
    assert row.figure is not None
    assert row.figure.values == (2.0,)


def test_a_session_can_write_all_that_it_has_to_say_to_the_counter() -> None:
    counter: Output = Counter()
    counter.notify(Notice("rank 1 waits"))
    counter.write(Text(0, 0, "stdout", "a\nb\n"))
    assert counter.lines == 2


def test_a_call_to_many_ranks_is_measured_beside_the_floor() -> None:
    raw, ours = Arm("raw pyzmq", lambda: []), Arm("distsession", lambda: [])
    raw.rounds, ours.rounds = [(4.0, 4.0), (6.0,)], [(5.6, 5.6), (12.0,)]
    least, beside, above = rows_beside_raw("call, N=16", 16, raw, ours)
    assert (least.is_met, beside.is_met, above.is_met) == (None, False, False)
    assert beside.ratio is not None
    assert above.figure is not None
    assert beside.ratio.values == pytest.approx((1.4, 2.0))
    assert above.figure.values == pytest.approx((100, 375))
    ours.rounds = [(5.6,), (6.8,)]
    assert [each.is_met for each in rows_beside_raw("call, N=16", 16, raw, ours)][1:] == [True] * 2


# --- programs -------------------------------------------------------------------------------------


def test_a_program_is_over_when_it_ends_whatever_it_has_started() -> None:
    sleep = "import subprocess; p = subprocess.Popen(['sleep', '30']); print(p.pid)"
    began = time.monotonic()
    pid = int(run_program([sys.executable, "-c", sleep]))
    os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - began < 20


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"exit code 1: (?s:.)*ZeroDivisionError"):
        run_program([sys.executable, "-c", "1 / 0"])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_cost_of_recording_is_measured_without_waiting(backend: str) -> None:
    [(plain, recorded, compared)] = json.loads(run_program(program("record_cost", 3, 1, backend)))
    assert 0 < plain < recorded
    assert 0 < plain < compared


# --- what comes of a fault ------------------------------------------------------------------------


def test_a_peer_that_does_not_come_back_says_so() -> None:
    outcomes: list[recovery.Outcome] = [{"ended": 0.5, "again": None}]
    ended = recovery._peer_row("end", "peer", "ended", outcomes)
    again = recovery._peer_row("next", "peer", "again", outcomes)
    assert ended.figure is not None
    assert (ended.figure.values, ended.note) == ((0.5,), "")
    assert (again.figure, again.note, again.failed) == (None, "not within 10 s", False)


def test_nothing_comes_after_a_cell_that_never_ended() -> None:
    outcomes: list[recovery.Outcome] = [{"ended": None, "again": None}]
    again = recovery._peer_row("next", "peer", "again", outcomes)
    assert again.note == "the cell before never ended"


# --- the tables of README.md and docs/figures.md --------------------------------------------------


def row(
    benchmark: str, subject: str, median: float | None, unit: str, **more: Any
) -> dict[str, Any]:
    ratio = more.pop("ratio", None)
    return {
        "benchmark": benchmark,
        "subject": subject,
        "figure": None if median is None else {"median": median},
        "unit": unit,
        "ratio": None if ratio is None else {"median": ratio},
        "note": "",
        "failed": False,
        **more,
    }


FACTS = {
    "cpus": 2,
    "packages": {"torch": "2.13.0+cpu"},
    "quick": True,
    "rows": [
        row("start to first barrier, N=4", "import torch", 1.28, "s"),
        row("start to first barrier, N=4", "the statement import torch", 0.86, "s", ratio=0.67),
        row("start to first barrier, N=4", "distsession", 1.4, "s", ratio=1.1),
        row("start to first barrier, N=4", "torchrun", 3.3, "s", ratio=2.58),
        row("start to first barrier, N=4", "nbdistributed", None, "s", note="not installed: ..."),
        row("Stop in a hung collective to ended cell, N=4", "distsession", 0.042, "s"),
        row("Stop in a hung collective to ended cell, N=4", "peer", None, "", note="not in 10 s"),
        row("Stop in a hung collective to ended cell, N=4", "odd", None, "", note="x", failed=True),
        row("left behind 2 s after the end", "distsession", 0, "left", note="in all, after 3 ends"),
        row("left behind 2 s after the end", "peer", 2, "left", note="in all, after 1 end; sleep"),
    ],
}


def test_the_long_table_has_what_was_measured() -> None:
    times = "\N{MULTIPLICATION SIGN}"
    assert markdown(FACTS).splitlines() == [
        BEGIN,
        "| | distsession | beside |",
        "|---|---|---|",
        f"| start to first barrier, 4 ranks | 1.10 {times} `import torch` | "
        f"the statement import torch 0.67 {times}, torchrun 2.58 {times} |",
        "| Stop in a hung collective, to the end of the cell | 42.0 ms | peer not in 10 s |",
        "| left behind 2 s after the end | 0 processes or folders after 3 ends | "
        "peer 2 after 1 end |",
        "",
        "Medians on 2 cores with torch 2.13.0 for the CPU; one `import torch` takes about 1.3 s "
        "there as a process, and 0.9 s as a statement.",
        "`python -m tests.benchmarks --quick` made them.",
        END,
    ]


def test_what_many_ranks_were_measured_at_is_in_the_long_table_alone() -> None:
    rows = [
        row("close(), 64 ranks", "distsession", 1.5, "s"),
        row("restart() of all, 64 ranks", "plain gloo, forked warm", 2.0, "s"),
        row("restart() of all, 64 ranks", "distsession", 3.0, "s", ratio=1.5),
    ]
    lines = markdown({**FACTS, "rows": rows}).splitlines()
    assert "| close(), 64 ranks | 1.50 s | |" in lines
    assert [line for line in lines if line.startswith("| restart() of all, 64 ranks | 1.50 ")]
    assert "64 ranks" not in markdown({**FACTS, "rows": rows}, main_only=True)


def test_a_line_shows_the_row_that_is_ours_before_one_that_only_begins_so() -> None:
    name = next(each.benchmark for each in LINES if each.benchmark.endswith("step by step"))
    bare = "distsession, with torch's own group"
    rows = [
        row(name, bare, 57.0, "us", ratio=1.09),
        row(name, "distsession", 56.0, "us", ratio=1.0),
    ]
    [line] = [each for each in markdown({**FACTS, "rows": rows}).splitlines() if "a step" in each]
    assert "1.00" in line
    assert "1.09" not in line


def test_plain_processes_pass_their_barrier() -> None:
    with many.PlainGloo(2) as plain:
        assert [seconds > 0 for seconds in (*plain.measure(), *plain.measure())] == [True, True]


def test_the_table_is_printed_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "facts.json"
    assert main(["--markdown", "--json", str(path)]) == 1
    assert "measure first" in capsys.readouterr().err
    path.write_text(json.dumps(FACTS))
    assert main(["--markdown", "--json", str(path)]) == 0
    tables = f"{markdown(FACTS, main_only=True)}\n\n{markdown(FACTS)}\n"
    assert capsys.readouterr().out == tables


def test_the_readme_has_five_rows_of_it() -> None:
    assert len([line for line in LINES if line.is_main]) == 5
    short = markdown(FACTS, main_only=True).splitlines()
    assert [line for line in short if line.startswith("| start")]
    assert not [line for line in short if "left behind" in line or "ended cell" in line]
    assert len(short) < len(markdown(FACTS).splitlines())
    assert set(short) <= set(markdown(FACTS).splitlines())
