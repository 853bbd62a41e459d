"""Reading logs on other hosts through the keeper, which is played here, as hosts are by folders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsession.cluster import host_logs
from distsession.cluster.host_logs import BURST, HostLogs
from distsession.engine import log_file
from distsession.engine.log_file import log_path, read_parts
from distsession.kernel import far_logs
from distsession.kernel.far_logs import FarLogs, FarTails, FarText
from distsession.kernel.log_tail import open_tails
from distsession.protocol.attach import LogPart, LogRead, LogsReply, LogsRequest, keeper_path
from tests.kept_agents import PlayedAgent

NAMES = {1: "gpu1", 2: "gpu2"}
RANKS = {1: (0,), 2: (1,)}


class Keeper:
    """Plays the process that keeps two hosts with a rank each, on one folder."""

    def __init__(self, agent: PlayedAgent):
        self.folder = str(agent.folder)
        self.kept = replace(agent.kept, keeper=agent.kept.agents[0])
        self.gone: set[int] = set()
        self.silent: set[int] = set()
        self.told: list[str] = []
        self._logs = HostLogs(lambda node: (NAMES[node], node in self.gone), self._ask)
        self._listener = Listener(keeper_path(self.folder), family="AF_UNIX")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _ask(self, node: int, question: object, timeout: float) -> LogsReply | None:
        assert isinstance(question, LogsRequest)
        assert {read.rank for read in question.reads} <= set(RANKS[node])
        return None if node in self.silent else LogsReply(read_parts(self.folder, question.reads))

    def _serve(self) -> None:
        while True:
            with self._listener.accept() as connection:
                try:
                    while (wanted := connection.recv()) is not None:
                        connection.send(LogsReply(self._logs.read(wanted.reads, RANKS)))
                except (EOFError, OSError):
                    continue
                return

    def close(self) -> None:
        logs = FarLogs(self.kept)
        connection = logs._connect()
        connection.send(None)
        self._thread.join()
        connection.close()
        self._listener.close()

    def write(self, rank: int, text: str, generation: int = 0) -> Path:
        path = Path(log_path(self.folder, rank, generation, "out"))
        with path.open("ab") as file:
            file.write(text.encode())
        return path

    def tails(self, lines: int | None = None) -> Any:
        return closing(open_tails(self.kept, (0, 1), ["stdout"], lines, self.told.append))


@pytest.fixture
def keeper(play: Callable[..., PlayedAgent], monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    monkeypatch.setattr(host_logs, "PAUSE_S", 0.0)
    made = Keeper(play())
    yield made
    made.close()


def read(tails: FarTails) -> dict[int, str]:
    """What ranks have written since the last time."""
    found: dict[int, str] = {}
    for rank, stream, data in tails.read():
        assert stream == "stdout"
        found[rank] = found.get(rank, "") + data.decode()
    return found


def test_the_last_lines_come_first_and_then_what_is_written(keeper: Keeper) -> None:
    keeper.write(0, "one\ntwo\nthree\n")
    keeper.write(1, "begun")
    with keeper.tails(lines=2) as tails:
        assert tails.is_there
        assert read(tails) == {0: "two\nthree\n", 1: "begun"}
        assert read(tails) == {}
        keeper.write(1, " and ended\n")
        assert read(tails) == {1: " and ended\n"}
    with keeper.tails(lines=0) as tails:
        assert read(tails) == {}
    assert keeper.told == []


def test_of_a_long_log_all_is_read_and_no_more_than_was_there(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "PARTS_BYTES", 10)
    text = "".join(f"line {number}\n" for number in range(10))
    keeper.write(0, text)
    with keeper.tails() as tails:
        found = tails.read()
        first = next(found)[2].decode()
        keeper.write(0, "later\n")
        rest = "".join(data.decode() for _, _, data in found)
        assert (first + rest + read(tails).get(0, "")) == text + "later\n"


def test_the_rest_of_a_process_comes_before_the_text_of_the_next(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "PARTS_BYTES", 10)
    keeper.write(0, "before\n")
    with keeper.tails() as tails:
        assert read(tails) == {0: "before\n"}
        keeper.write(0, "its last words\n")
        keeper.write(0, "fresh\n", generation=3)
        assert read(tails) == {0: "its last words\nfresh\n"}
        keeper.write(0, "more\n", generation=3)
        assert read(tails) == {0: "more\n"}


def test_what_was_given_back_to_the_disk_is_told(keeper: Keeper) -> None:
    path = keeper.write(0, "")
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    keeper.write(0, "the end\n")
    with keeper.tails() as tails:
        assert read(tails) == {0: "the end\n"}
    assert keeper.told == [
        "1,048,576 bytes of text that were given back to the disk are missing here"
    ]
    logs = FarLogs(keeper.kept)
    with closing(logs):
        assert logs.since({(0, "out"): 8}) == {
            (0, "out"): FarText(1 << 20, (1 << 20) - 8, b"the end\n")
        }


def test_of_the_text_of_a_cell_the_end_is_had(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_logs, "TEXT_BYTES", 100)
    monkeypatch.setattr(log_file, "PARTS_BYTES", 10)
    keeper.write(0, "x" * 70 + "y" * 50)
    keeper.write(1, "short")
    with closing(FarLogs(keeper.kept)) as logs:
        assert logs.since({(0, "out"): 20, (1, "out"): 1}) == {
            (0, "out"): FarText(70, 50, b"y" * 50),
            (1, "out"): FarText(1, 0, b"hort"),
        }


def test_a_host_that_is_gone_is_told_once_and_the_others_go_on(keeper: Keeper) -> None:
    keeper.write(0, "zero\n")
    keeper.write(1, "one\n")
    with keeper.tails() as tails:
        assert read(tails) == {0: "zero\n", 1: "one\n"}
        keeper.gone.add(2)
        keeper.write(0, "more\n")
        assert read(tails) == {0: "more\n"}
        assert read(tails) == {}
        assert keeper.told == ["gpu2 is gone, and what its ranks wrote with it"]
        keeper.gone.clear()
        assert read(tails) == {}
        keeper.gone.add(2)
        assert read(tails) == {}
        assert len(keeper.told) == 2


def test_of_a_host_that_answers_late_the_last_lines_come_then(keeper: Keeper) -> None:
    keeper.write(0, "zero\n")
    keeper.write(1, "one\ntwo\n")
    keeper.silent.add(2)
    with keeper.tails(lines=1) as tails:
        assert tails.is_there
        assert tails.problem == "gpu2 does not answer now"
        assert read(tails) == {0: "zero\n"}
        assert keeper.told == ["gpu2 does not answer now"]
        keeper.silent.clear()
        assert read(tails) == {1: "two\n"}


def test_a_rank_without_a_log_has_all_of_it_shown_when_it_comes(keeper: Keeper) -> None:
    with keeper.tails(lines=1) as tails:
        assert not tails.is_there
        assert tails.problem == ""
        assert read(tails) == {}
        keeper.write(1, "one\ntwo\n")
        assert read(tails) == {1: "one\ntwo\n"}


def test_a_keeper_that_is_not_there_is_a_problem_and_no_error(
    play: Callable[..., PlayedAgent],
) -> None:
    agent = play()
    kept = replace(agent.kept, keeper=agent.kept.agents[0])
    told: list[str] = []
    with closing(open_tails(kept, (0, 1), ["stdout"], 5, told.append)) as tails:
        assert not tails.is_there
        assert f"(pid {kept.keeper}) does not answer" in tails.problem
        assert list(tails.read()) == []
        assert told == [tails.problem]
    with closing(open_tails(kept, (0, 1), ["stdout"], 5, told.append)) as tails:
        agent.close()
        assert list(tails.read()) == []  # it has ended, which is told otherwise
    assert len(told) == 1


def test_after_stop_the_next_question_gets_its_own_answer(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.write(0, "zero")
    keeper.write(1, "one")

    def stop(self: FarLogs, connection: Connection) -> str:
        assert connection.poll(10)
        raise KeyboardInterrupt

    with closing(FarLogs(keeper.kept)) as logs:
        with monkeypatch.context() as patch:
            patch.setattr(FarLogs, "_wait", stop)
            with pytest.raises(KeyboardInterrupt):
                logs.read([LogRead(0, "out", None, 0, 10)])
        (part,) = logs.read([LogRead(1, "out", None, 0, 10)])
        assert part.data == b"one"


# --- the keeper asks hosts ------------------------------------------------------------------------

READ = LogRead(0, "out", None, 0, 10)


def test_who_asks_too_often_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(host_logs, "time", clock)
    logs = HostLogs(lambda node: ("gpu1", False), lambda *_: LogsReply((LogPart(path="here"),)))
    for _ in range(BURST + 11):
        assert logs.read([READ], RANKS) == (LogPart(path="here"),)
    assert sum(slept) == 10 * host_logs.PAUSE_S


def test_a_host_is_asked_one_thing_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_logs, "PAUSE_S", 0.0)
    asked, together = threading.Lock(), []

    def ask(*_: object) -> LogsReply:
        together.append(not asked.acquire(blocking=False))
        time.sleep(0.01)
        if not together[-1]:
            asked.release()
        return LogsReply((LogPart(),))

    logs = HostLogs(lambda node: ("gpu1", False), ask)
    threads = [threading.Thread(target=logs.read, args=([READ], RANKS)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [False] * 8


def test_what_no_host_has_or_answers_as_asked_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_logs, "PAUSE_S", 0.0)
    logs = HostLogs(lambda node: (NAMES[node], False), lambda *_: LogsReply(()))
    nobody = replace(READ, rank=7)
    assert logs.read([nobody, READ], RANKS) == (
        LogPart(),
        LogPart(problem="gpu1 does not answer now"),
    )
