"""Sessions whose hosts a command of the user's starts; this machine plays them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession import LaunchError, OptionsError, RunError, Session, SessionStateError
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


def test_no_host_ends_where_its_move_is_refused(folder: Path) -> None:
    with Session(
        launcher="command",
        command="{agent} < {keys}",
        hosts=NAMES,
        ranks_per_host=[1, 1],
        folder=str(folder),
    ) as session:
        before = session.infos
        run = session[0].submit(time.sleep, 8)
        until(lambda: session.channel.is_busy(0))
        with pytest.raises(SessionStateError, match="rank 0 still runs something"):
            session.restart(hosts={"gpu2": "gpu3"})
        with pytest.raises(SessionStateError, match="rank 0 still runs something"):
            session.restart(hosts={"gpu2": "gpu3"}, restore="rank")
        with pytest.raises(SessionStateError, match="none does"):
            session.restart(hosts={"gpu1": "gpu4", "gpu2": "gpu3"}, restore="rank")
        run.result(60)
        with pytest.raises(RunError, match="modle"):
            session.restart(hosts={"gpu2": "gpu3"}, restore="modle")
        with pytest.raises(OptionsError, match="gpu1"):
            session.restart(hosts={"gpu2": "gpu1"})
        assert session.infos == before
        assert [host.name for host in session.hosts] == list(NAMES)
        assert reduced(session) == [2.0, 2.0]


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


# --- a program that prints for ever ---------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("options", [{"ranks_per_host": [1]}, {"hosts": ["gpu1"]}], ids=str)
@pytest.mark.parametrize(
    "flood", ["yes this is not an agent; {agent}", "cat /dev/zero | tr '\\0' x; {agent}"]
)
def test_a_program_that_prints_for_ever_fails_the_start_and_shows_its_last_lines(
    folder: Path, options: dict[str, Any], flood: str
) -> None:
    before = resident_bytes()
    with pytest.raises(LaunchError, match="has written more than 16 MiB") as caught:
        Session(launcher="command", command=flood, folder=str(folder), **options)
    assert ("this is not an agent" if "yes" in flood else "xxxx") in str(caught.value)
    assert len(str(caught.value)) < 8000
    assert resident_bytes() - before < 100 << 20


def test_a_program_that_prints_much_before_its_agent_comes_is_no_failure(folder: Path) -> None:
    command = "head -c 5000000 /dev/zero | tr '\\0' '\\n'; {agent}"
    with Session(
        launcher="command", command=command, ranks_per_host=[1], folder=str(folder)
    ) as session:
        assert session.evaluate("rank") == {0: 0}


def test_a_program_that_prints_beside_its_agent_fills_no_disk(folder: Path) -> None:
    goes_on = folder / "goes-on"
    goes_on.touch()
    text = "head -c 4000000 /dev/zero | tr '\\0' x"
    prints = f"sleep 2; while [ -e {goes_on} ]; do {text}; sleep 0.02; done"
    with Session(
        launcher="command", command=f"echo begin; ({prints}) & {{agent}}",
        ranks_per_host=[1], folder=str(folder),
    ) as session:  # fmt: skip

        def written() -> os.stat_result:
            files = [path for path in folder.rglob("*") if path.is_file()]
            return max((path.stat() for path in files), key=lambda status: status.st_size)

        until(lambda: written().st_size > 200 << 20, "200 MiB of output")
        until(lambda: 512 * written().st_blocks < 64 << 20, "the middle to be given back")
        goes_on.unlink()
        assert session.evaluate("rank") == {0: 0}
