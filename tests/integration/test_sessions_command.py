"""Sessions whose hosts a command of the user's starts; this machine plays them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession import OptionsError, RunError, Session, SessionStateError
from tests.until import Press, until

pytestmark = pytest.mark.timeout(120)

NAMES = ("gpu1", "gpu2")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a start has its folder, of which nothing is left."""
    yield tmp_path
    assert list(tmp_path.glob("distsession-*")) == []


def host_pid(session: Session, node: int) -> int:
    launcher: Any = session.launcher
    return int(launcher._hosts.links[node].pid)


def reduced(session: Session) -> list[float]:
    session.execute("t = torch.ones(())\ndist.all_reduce(t)")
    return [float(value) for value in session.pull("t").values()]


def end_host(session: Session) -> None:
    """End the process of the second host amid a cell, and see its rank said to be gone."""
    pid = host_pid(session, 1)
    with (
        Press(session, lambda: os.kill(pid, signal.SIGKILL)),
        pytest.raises(RunError, match=r"rank 1 \(pid \d+\) is gone: the agent on gpu2 "),
    ):
        session.execute("dist.barrier() if rank == 0 else __import__('time').sleep(60)")


def test_a_host_that_a_command_starts_is_replaced(folder: Path) -> None:
    command = "echo {host} >> started; {agent} < {keys}"
    (folder / "work").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "work")
        with Session(
            launcher="command",
            command=command,
            hosts=NAMES,
            ranks_per_host=[1, 1],
            folder=str(folder),
        ) as session:
            assert [(host.name, host.ranks) for host in session.hosts] == [
                ("gpu1", (0,)), ("gpu2", (1,)),
            ]  # fmt: skip
            session.execute("kept = rank + 5")
            end_host(session)
            session.restart(hosts=["gpu2"], restore="kept")
            assert reduced(session) == [2.0, 2.0]
            session.restart(hosts={"gpu2": "gpu3"}, restore="kept")
            assert [host.name for host in session.hosts] == ["gpu1", "gpu3"]
            assert reduced(session) == [2.0, 2.0]
            assert dict(session.pull("kept")) == {0: 5, 1: 5}
        assert sorted(Path("started").read_text().split()) == ["gpu1", "gpu2", "gpu2", "gpu3"]


def test_hosts_that_one_command_starts_are_started_anew_together(folder: Path) -> None:
    each = "env SLURMD_NODENAME={} SLURM_NODEID={} {{agent}} & "
    command = "".join(each.format(name, place) for place, name in enumerate(NAMES))
    with Session(
        launcher="command", command=f"{command}wait", ranks_per_host=[1, 1], folder=str(folder)
    ) as session:
        before = host_pid(session, 0)
        end_host(session)
        with pytest.raises(SessionStateError, match=r"restart\(\) starts all of them anew"):
            session.restart(hosts="gpu2")
        with pytest.raises(OptionsError, match="chooses the hosts itself"):
            session.restart(hosts={"gpu2": "gpu3"})
        session.restart()
        assert reduced(session) == [2.0, 2.0]
        assert host_pid(session, 0) != before
        until(lambda: not os.path.exists(f"/proc/{before}"), "the end of the host before")
