"""Ranks go on printing when the disk with their logs is full, and logs do not grow for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from distsession import DistsessionError, EngineDiedError, LaunchError, RunError, Session
from distsession.protocol import places
from tests.until import until

from .conftest import Recorder

WARNING = "there is no space left on the disk"
EVERY_WAY = """
import os, subprocess, sys
print("from python", rank)
os.write(1, b"from a descriptor\\n")
subprocess.run(["echo", "from a subprocess"], check=True)
print("to stderr", file=sys.stderr)
print("python again", rank)
"""


def heard(rank: int) -> str:
    return f"from python {rank}\nfrom a descriptor\nfrom a subprocess\npython again {rank}\n"


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of 8 MB, on which sessions have their folders."""
    folder = Path(tempfile.mkdtemp(prefix="disk-", dir="/tmp"))  # short: it holds unix sockets
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(folder))
            patch.setattr(tempfile, "tempdir", str(folder))
            yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


FILLS = """
with open({filler!r}, "wb", buffering=0) as file:
    for size in (1 << 16, 1 << 12, 1):
        try:
            while True:
                file.write(b"x" * size)
        except OSError:
            continue
"""
"""A module that fills the disk when the agent imports it."""


def fill(disk: Path) -> Path:
    """Take all the room that there is; gives the file that has it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


@pytest.fixture(scope="module")
def small(_no_leaks: None) -> Iterator[tuple[Session, Recorder, Path]]:
    """A session on a small disk."""
    output = Recorder()
    with small_disk() as disk, Session(2, output=output) as session:
        assert session.client.ids == [0, 1]  # what ipyparallel writes is there already
        yield session, output, disk


@pytest.fixture
def full(small: tuple[Session, Recorder, Path]) -> Iterator[tuple[Session, Recorder, Path]]:
    """A session whose disk is full, and the file that fills it."""
    session, output, disk = small
    session.execute("print('at first')")
    output.clear()
    filler = fill(disk)
    yield session, output, filler
    filler.unlink(missing_ok=True)


def test_nothing_that_prints_fails_and_everything_is_shown(
    full: tuple[Session, Recorder, Path],
) -> None:
    session, output, filler = full
    for number in range(5):
        output.clear()
        session.execute(EVERY_WAY)
        for rank in (0, 1):
            assert output.text(rank) == heard(rank), number
            assert output.text(rank, "stderr").replace("\n", " ").count("to stderr") == 1
    assert list(session.evaluate("rank * 2").values()) == [0, 2]
    filler.unlink()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        session[0].run(lambda: print("there is room again"))
        path = session.log_path(0)
        assert path is not None
        if b"there is room again" in path.read_bytes():
            break
    else:
        pytest.fail("the log did not go on")


def test_it_is_said_once_for_each_rank() -> None:
    output = Recorder()
    with small_disk() as disk, Session(2, output=output) as session:
        assert session.client.ids == [0, 1]
        fill(disk)
        for _ in range(3):  # more than was reserved, so the disk is seen to be full
            session.execute("for i in range(4000): print('x' * 100)")
        session.execute("import sys; print('later', file=sys.stderr)")
        for rank in (0, 1):
            assert output.text(rank).count("x" * 100 + "\n") == 12_000
            errors = output.text(rank, "stderr")
            assert errors.count(WARNING) == 1
            assert errors.endswith("later\n")
            assert str(Path(str(session.log_path(0))).parent) in errors


def test_more_than_fits_on_the_disk_can_be_printed(
    full: tuple[Session, Recorder, Path],
) -> None:
    session, output, _ = full
    lines = 200_000
    session[0].run(lambda: [print(f"line {i:>40}") for i in range(lines)] and None)
    assert output.text(0) == "".join(f"line {i:>40}\n" for i in range(lines))
    output.clear()
    session.execute(
        "import sys\nfor i in range(3000): print(i, file=(sys.stdout, sys.stderr)[i % 2])"
    )
    for rank in (0, 1):
        assert output.text(rank) == "".join(f"{i}\n" for i in range(0, 3000, 2))
    output.clear()
    session.execute("for i in range(20_000): print('x' * 50)")
    session.execute(EVERY_WAY)
    for rank in (0, 1):
        assert output.text(rank).endswith(heard(rank))


def test_characters_are_not_torn_apart(full: tuple[Session, Recorder, Path]) -> None:
    session, output, _ = full
    text = "äöü€𝄞" * 200_000
    session[0].execute(f"print({text[:5]!r} * 200_000)")
    assert output.text(0) == text + "\n"


def test_a_forked_child_may_print_too(full: tuple[Session, Recorder, Path]) -> None:
    session, _, _ = full
    codes = session.execute(
        "import os\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    for _ in range(200_000): print('of a child' * 10)\n"
        "    os._exit(0)\n"
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
        fetch=True,
    )
    assert codes is not None
    assert dict(codes) == {0: 0, 1: 0}


def allocated(path: Path | None) -> int:
    assert path is not None
    return os.stat(path).st_blocks * 512


def test_a_log_that_is_too_long_loses_its_front(start: Callable[..., Session]) -> None:
    output = Recorder()
    session = start(1, keep_output="1M", output=output)
    session.execute("for i in range(100_000): print(f'line {i:>80}')")
    assert output.text(0) == "".join(f"line {i:>80}\n" for i in range(100_000))
    path = session.log_path(0)
    assert path is not None
    assert path.stat().st_size == 100_000 * 86
    assert path.read_bytes().endswith(output.text(0).encode()[-900_000:])
    deadline = time.monotonic() + 10
    while allocated(path) > 2 << 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert allocated(path) <= 2 << 20
    assert WARNING not in output.text(0, "stderr")


def test_a_dead_rank_keeps_no_room(start: Callable[..., Session]) -> None:
    session = start(2)
    session.execute("print('its last words')")
    path = session.log_path(1)
    assert path is not None
    os.kill(session.infos[1].pid, signal.SIGKILL)
    with pytest.raises((EngineDiedError, RunError)):
        session.execute("dist.barrier()")
    assert allocated(path) <= 1 << 16
    assert path.read_text() == "its last words\n"


def refusal(session: Session) -> str:
    """What a restart says that fails; empty if it does not."""
    try:
        session.restart()
    except DistsessionError as error:
        return str(error)
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_kept", [False, True], ids=["not kept", "kept"])
@pytest.mark.parametrize("lost", ["nothing", "a rank", "the agent"])
def test_a_restart_on_a_full_disk_works_or_says_why_and_works_later(
    is_kept: bool, lost: str
) -> None:
    keep = {"keep": 60, "name": "full"} if is_kept else {}
    with small_disk() as disk, Session(2, output=Recorder(), **keep) as session:
        victim = session.infos[1].pid
        if lost == "the agent":
            victim = psutil.Process(victim).ppid()
        if lost != "nothing":
            os.kill(victim, signal.SIGKILL)
            until(lambda: 1 in session.launcher.dead_ranks(), "the end of what was killed")
        filler = fill(disk)
        said = refusal(session)
        if said:  # what is written of a kept session may have found the room of what was removed
            assert is_kept
            assert said.startswith("the restart failed: [Errno 28] No space left on device"), said
            assert said.endswith("Once that is mended, session.restart() starts all ranks."), said
            filler.unlink()
            assert not refusal(session)
        assert session.evaluate("rank") == {0: 0, 1: 1}
        session.execute("t = torch.ones(1)\ndist.all_reduce(t)")
        assert session.evaluate("int(t)") == {0: 2, 1: 2}


@pytest.mark.timeout(120)
def test_a_start_takes_another_place_where_the_disk_is_full_and_else_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_disk() as disk:
        filler = fill(disk)
        with Session(1, keep=60, name="full", output=Recorder()) as session:
            assert not (session.launcher.folder or "").startswith(str(disk))
            assert session.evaluate("rank") == {0: 0}
        monkeypatch.setattr(places, "places", lambda: [str(disk)])
        with pytest.raises(LaunchError) as caught:
            Session(1, keep=60, name="full")
        assert f"{disk}: No space left on device" in str(caught.value)
        assert "Set TMPDIR to a short path" in str(caught.value)
        assert [path.name for path in disk.iterdir()] == [filler.name]


@pytest.mark.timeout(120)
def test_a_disk_that_gets_full_as_a_session_starts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk() as disk:
        (tmp_path / "fills.py").write_text(FILLS.format(filler=str(disk / "filler")))
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(LaunchError) as caught:
            Session(1, keep=60, name="full", preload=["fills"])
        assert "No space left on device" in str(caught.value)
        assert "session.restart" not in str(caught.value)
        assert [path.name for path in disk.iterdir()] == ["filler"]
