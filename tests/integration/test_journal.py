"""What a session remembers is in its journal, and another process remembers the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession import RunError, Session
from distsession.export.history import Call, History
from distsession.export.script import script_text
from distsession.kernel import journal
from distsession.kernel.journal import read_journal
from distsession.kernel.output import Output
from distsession.kernel.replay import replay, replayed_text
from distsession.kernel.requests import Requests
from distsession.kernel.runs import RunKind
from distsession.kernel.session_record import Known, SessionRecord, known_runs

from .conftest import Recorder
from .test_full_disk import fill, small_disk

READER = """
import json, sys
from distsession.export.history import History
from distsession.kernel.output import Output
from distsession.kernel.requests import Requests
from distsession.kernel.session_record import SessionRecord

history, requests = History(), Requests(None, Output, lambda: None)
known = SessionRecord(requests, history).restore(sys.argv[1], 2)
print(json.dumps({
    "entries": [(each.name, each.problem, getattr(each, "source", ""), getattr(each, "times", 0))
                for each in history.entries],
    "torch": "torch" in sys.modules,
    "last": requests.last_run.number,
    "failed": requests.failed_rank,
    "ended": sorted(known.ended.items()),
}))
"""


class Cell(Recorder):
    """Output of a notebook's cell."""

    def __init__(self, cell: int):
        super().__init__()
        self.cell = cell


@pytest.fixture(scope="module")
def shared_session() -> Iterator[Session]:
    with Session(2, output=lambda: current[0]) as session:
        yield session


current: list[Output] = [Cell(1)]


@pytest.fixture
def session(shared_session: Session, tmp_path: Path) -> Iterator[Session]:
    """With a journal in a folder of the test's own."""
    current[0] = Cell(1)
    shared_session.history.clear()
    record = SessionRecord(shared_session.requests, shared_session.history)
    record.begin(str(tmp_path), 1)
    yield shared_session
    record.end()


class Restored:
    """What a new kernel knows."""

    def __init__(self, folder: Path, kernel: int = 2):
        self.history = History()
        self.requests = Requests(None, Output, lambda: None)  # type: ignore[arg-type]
        self.record = SessionRecord(self.requests, self.history)
        self.known: Known = self.record.restore(str(folder), kernel)

    def output(self, cell: int) -> tuple[Recorder, str]:
        recorder = Recorder()
        runs = self.requests.outputs.runs(cell)
        missing = [line for run in runs for line in replay(run, recorder, run.ranks)]
        return recorder, replayed_text(runs, missing)


def train(steps: int) -> int:
    return steps * scale


scale = 3


def test_cells_calls_and_what_they_put_out_are_known_to_another_process(
    session: Session, tmp_path: Path
) -> None:
    current[0] = Cell(4)
    session.execute("print('line', rank)\nx = rank\nx", label="In[4]")
    current[0] = Cell(5)
    session.evaluate("x + 1", label="In[5]")
    for _ in range(3):
        session.run(train, 2)
    session.push(lr=0.5)
    current[0] = Cell(6)
    with pytest.raises(RunError):
        session.execute("if rank: raise ValueError('no')", label="In[6]")

    restored = Restored(tmp_path)
    names = [entry.name for entry in session.history.entries]
    assert [entry.name for entry in restored.history.entries] == names
    (call,) = (e for e in restored.history.entries if isinstance(e, Call))
    assert call.times == 3
    assert restored.requests.last_run == session.last_run
    assert restored.requests.failed_rank == session.requests.failed_rank == 1
    recorder, text = restored.output(4)
    assert [recorder.text(rank) for rank in (0, 1)] == ["line 0\n", "line 1\n"]
    assert [data["text/plain"] for data, _ in recorder.shown[0].values()] == ["0", "1"]
    assert text.startswith("This was the output of In[4] of kernel 1, which began at ")
    assert "ValueError" in restored.output(6)[1]

    said = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, check=True
    )
    found = json.loads(said.stdout)
    assert [name for name, *_ in found["entries"]] == names
    assert found["last"] == session.last_run.number
    assert found["failed"] == 1
    assert not found["torch"]


def test_a_script_can_be_exported_that_has_what_an_earlier_kernel_ran(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "scale"):
        monkeypatch.setattr(sys.modules["__main__"], name, globals()[name], raising=False)
    monkeypatch.setattr(train, "__module__", "__main__")
    session.execute("x = 1", label="In[4]")
    session.run(train, 2)
    session.run(train, 2)
    here = script_text(session, "train.py")
    restored = Restored(tmp_path)
    monkeypatch.setattr(session, "history", restored.history)
    assert script_text(session, "train.py") == here
    assert "def train(steps: int)" in here


def test_a_run_is_known_before_its_ranks_have_it(session: Session, tmp_path: Path) -> None:
    journal = str(tmp_path)
    found = session.run(_known_on_rank, journal)
    for cells in found.values():
        assert cells[-1] == ("call", "_known_on_rank", 1, False)
    code = "known = __import__(__name__ and 'tests.integration.test_journal', fromlist=['x'])"
    session.execute(code)
    current[0] = Cell(9)
    shown = session.execute(f"known._known_on_rank({journal!r})[-1]", fetch=True, label="In[9]")
    assert shown is not None
    assert {*shown.values()} == {("cell", "In[9]", 9, False)}
    assert known_runs(journal).ended[session.last_run.number] is True  # type: ignore[union-attr]


def _known_on_rank(folder: str) -> list[tuple[str, str, int | None, bool]]:
    known = known_runs(folder)
    return [
        (run.kind.value, run.label, run.cell, run.request in known.ended)
        for run in known.began.values()
    ]


def test_what_runs_when_the_kernel_ends_is_known_as_not_ended(
    session: Session, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    future = session.submit(_wait_for, str(gate))
    restored = Restored(tmp_path)
    gate.touch()
    assert set(future.result(60).values()) == {True}
    (run,) = (r for r in restored.known.began.values() if r.request not in restored.known.ended)
    assert (run.kind, run.title) == (RunKind.SUBMIT, "_wait_for() in In[1]")
    entry = restored.history.find(run.entry)
    assert entry is not None
    assert not entry.succeeded
    restored.history.keep(entry)
    assert restored.history.entries[-1].name == "session.run(_wait_for)"


def _wait_for(path: str) -> bool:
    import os
    import time

    while not os.path.exists(path):
        time.sleep(0.01)
    return True


def test_a_cell_of_a_new_kernel_has_another_name_where_ranks_know_it(
    session: Session, tmp_path: Path
) -> None:
    session.execute("1", label="In[3]")
    names = Restored(tmp_path).requests.names
    assert (names.name(3), names.name(2)) == ("In[3] (kernel 2)", "In[2]")
    assert names.next(3, "execute") == "In[3] (kernel 2, execute)"
    assert names.next(3, "execute") == "In[3] (kernel 2, execute 2)"


def test_what_was_restored_is_in_the_journal_of_the_new_kernel(
    session: Session, tmp_path: Path
) -> None:
    current[0] = Cell(14)
    session.execute("print('old')", label="In[14]")
    session.run(train, 2)
    second = Restored(tmp_path)
    second.record.begin(str(tmp_path), 2)
    second.record.end()
    third = Restored(tmp_path, 3)
    assert [e.name for e in third.history.entries] == [e.name for e in second.history.entries]
    assert third.requests.last_run == session.last_run
    assert third.requests.names.taken >= {14}
    assert third.output(14)[0].text(1) == "old\n"


def test_a_restart_of_all_ranks_forgets_what_ran(
    start: Callable[..., Session], tmp_path: Path
) -> None:
    session = start(2, output=Recorder())
    record = SessionRecord(session.requests, session.history)
    record.begin(str(tmp_path), 1)
    session.execute("x = 1")
    with pytest.raises(RunError):
        session.execute("1 / 0")
    session.restart()
    session.execute("y = 2")
    restored = Restored(tmp_path)
    assert [getattr(e, "source", "") for e in restored.history.entries] == ["y = 2"]
    assert restored.requests.failed_rank is None
    record.end()


def test_without_a_journal_nothing_is_written(start: Callable[..., Session]) -> None:
    session = start(2, output=Recorder())
    session.execute("print(1)")
    assert session.log_path(0) is not None
    folder = Path(str(session.log_path(0))).parent.parent
    assert not list(folder.glob("journal*"))


def test_a_full_disk_fails_no_cell_and_nothing_is_missing_when_there_is_room_again(
    shared_session: Session, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "TRY_AGAIN_S", 0.0)
    with small_disk() as disk:
        record = SessionRecord(shared_session.requests, shared_session.history)
        record.begin(str(disk), 1)
        current[0] = Cell(21)
        shared_session.execute("print('before')", label="In[21]")
        filler = fill(disk)
        current[0] = Cell(22)
        for _ in range(100):  # the file's last block takes some more
            shared_session.execute("print('during')", label="In[22]")
        (warned,) = (each for each in caplog.records if each.name.endswith("journal"))
        assert "No space left on device" in warned.getMessage()
        filler.unlink()
        current[0] = Cell(23)
        shared_session.execute("print('after')", label="In[23]")
        restored = Restored(disk)
        assert [restored.output(cell)[0].text(0) for cell in (21, 22, 23)] == [
            "before\n", "during\n" * 100, "after\n",
        ]  # fmt: skip
        record.end()


def test_ten_thousand_cells_take_bounded_room(session: Session, tmp_path: Path) -> None:
    """As a notebook's loop makes them, with outputs; the ranks need not take part."""
    requests: Any = session.requests
    history = session.history
    for number in range(1, 10_001):
        record = requests.outputs.begin(number, (0, 1), session.log_path, request=number + 10**6)
        entry = history.cell((0, 1), f"x = {number}  # {'.' * 200}", f"In[{number}]")
        for rank in (0, 1):
            record._pieces(rank)
            record.show({rank: ({"text/plain": "v" * 2000}, {})})
        requests._settle(number + 10**6, record, True)
        history.keep(entry)
        requests.journal.tidy()
    size = (tmp_path / "journal-1").stat().st_size
    assert size < 2 * 8 << 20
    restored = Restored(tmp_path)
    assert len(restored.history.entries) == 1000
    assert restored.history.forgotten == history.forgotten
    assert len(read_journal(str(tmp_path))) < 40_000
