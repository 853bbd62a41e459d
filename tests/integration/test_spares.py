"""Ranks that were forked before anybody asked for them are as those that are forked when asked."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distsession import RunError, Session
from tests.integration.agent_children import spares_of, wait_for_spares
from tests.memory_pages import needs_copied_pages
from tests.until import until

RANKS = 2


@pytest.fixture(scope="module")
def _shared() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SET_BEFORE_THE_START", "yes")
        patch.setenv("CHANGED_AFTER_THE_SPARES", "before")
        with Session(RANKS, threads=1) as session:
            yield session


@pytest.fixture
def session(_shared: Session) -> Session:
    """A session whose agent has a spare for each rank."""
    wait_for_spares(_shared)
    return _shared


def agent(session: Session) -> psutil.Process:
    return psutil.Process(psutil.Process(session.infos[0].pid).ppid())


def pids(session: Session) -> set[int]:
    return {info.pid for info in session.infos}


def reduced(session: Session) -> set[float]:
    code = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    return set(session.execute(code, fetch=True).values())


def test_a_restart_takes_what_is_there_and_others_are_made(session: Session) -> None:
    ahead = spares_of(session)
    session.restart()
    assert pids(session) == ahead
    assert reduced(session) == {RANKS}
    wait_for_spares(session)
    assert not spares_of(session) & ahead


def test_a_rank_that_dies_is_replaced_by_one_of_them(session: Session) -> None:
    ahead = spares_of(session)
    session.execute("kept = 7")
    with pytest.raises(RunError, match=r"rank 1 .* was killed by SIGKILL"):
        session.execute(
            "import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)"
        )
    session.restart([1], restore=["kept"])
    assert session.infos[1].pid in ahead
    assert session.evaluate("kept") == {0: 7, 1: 7}
    assert reduced(session) == {RANKS}


@needs_copied_pages
@pytest.mark.parametrize("kind", ["Private_Dirty", "Shared_Clean"])
def test_they_have_copied_and_mapped_what_a_rank_does_as_it_begins(
    session: Session, kind: str
) -> None:
    def kilobytes(found: set[int]) -> dict[int, int]:
        text = {pid: Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in found}
        return {pid: int(re.findall(rf"^{kind}: *(\d+)", text[pid], re.M)[0]) for pid in found}

    session.restart()
    wait_for_spares(session)
    begun = min(kilobytes(pids(session)).values())
    taken: dict[int, int] = {}

    def is_taken() -> bool:
        taken.clear()
        taken.update(kilobytes(spares_of(session)))
        return min(taken.values()) > 0.8 * begun

    try:
        until(is_taken)
    except AssertionError:
        pytest.fail(f"spares have {taken} kB, and ranks {kilobytes(pids(session))}, then {begun}")


def test_they_have_the_folder_the_environment_and_the_path_of_the_restart(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = spares_of(session)
    (tmp_path / "made_after_the_spares.py").write_text("value = 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_AFTER_THE_SPARES", "yes")
    monkeypatch.setenv("CHANGED_AFTER_THE_SPARES", "after")
    monkeypatch.delenv("SET_BEFORE_THE_START")
    monkeypatch.syspath_prepend(str(tmp_path))
    session.restart()
    assert pids(session) == ahead
    session.execute("import os, made_after_the_spares")
    found = session.evaluate(
        "(os.getcwd(), os.environ['SET_AFTER_THE_SPARES'], made_after_the_spares.value)"
    )
    assert set(found.values()) == {(str(tmp_path), "yes", 5)}
    names = session.evaluate("[name for name in os.environ if name.startswith('SET_BEFORE')]")
    assert list(names.values()) == [[]] * RANKS
    changed = session.evaluate("os.environ['CHANGED_AFTER_THE_SPARES']")
    assert set(changed.values()) == {"after"}


def test_they_have_what_was_preloaded_since(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "preloaded_since.py").write_text("import os\npid = os.getpid()")
    before = spares_of(session)
    session.preload("preloaded_since")
    wait_for_spares(session)
    assert not spares_of(session) & before
    session.restart()
    session.execute("import preloaded_since")
    assert set(session.evaluate("preloaded_since.pid").values()) == {agent(session).pid}


def test_their_random_numbers_differ(session: Session) -> None:
    found: list[float] = []
    for _ in range(2):
        wait_for_spares(session)
        session.restart()
        session.execute("import random")
        for draw in ("random.random()", "torch.rand(1).item()"):
            found += session.evaluate(draw).values()
    assert len(set(found)) == len(found) == 4 * RANKS


def test_one_that_is_killed_before_is_not_missed(session: Session) -> None:
    for pid in spares_of(session):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not spares_of(session), "the end of the spares")
    session.restart()
    assert reduced(session) == {RANKS}


def test_they_end_with_the_session_and_with_its_agent() -> None:
    for end in ("close", "kill"):
        session = Session(RANKS, threads=1)
        try:
            wait_for_spares(session)
            ahead = [psutil.Process(pid) for pid in spares_of(session)]
            if end == "kill":
                agent(session).kill()
        finally:
            session.close()
        assert not psutil.wait_procs(ahead, timeout=10)[1]


def test_an_old_session_has_no_more_of_them(session: Session) -> None:
    for _ in range(10):
        session.restart()
        wait_for_spares(session)
    children = agent(session).children()
    assert len(children) == len({*pids(session), *spares_of(session)}) + 2  # and the two stores


def test_a_session_that_is_kept_takes_them_too(tmp_path: Path) -> None:
    with Session(RANKS, threads=1, keep="1h", name="with-spares") as session:
        wait_for_spares(session)
        ahead = spares_of(session)
        session.restart()
        assert pids(session) == ahead
        session.execute("kept = rank")
        session.detach()
    with Session.attach("with-spares") as session:
        assert session.evaluate("kept") == {0: 0, 1: 1}
        assert reduced(session) == {RANKS}
        session.close()
