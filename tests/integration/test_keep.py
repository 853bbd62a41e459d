"""Ranks that are kept outlive their kernel for as long as was said, and belong to one at a time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distsession import Session, SessionStateError
from distsession.cluster import attachment
from distsession.cluster.end_kept import end_session
from distsession.cluster.kept import find_kept
from distsession.errors import KeptSessionError
from distsession.protocol import folder_lock, unix_socket
from distsession.protocol.attach import attach_path
from tests.integration.conftest import Recorder
from tests.until import until

BEGIN = """
import os, signal, sys, threading, time
from distsession import Session

def say(text):
    print(text, flush=True)

def attempt(what):
    try:
        what()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("nothing was said")
"""
TAKEN = re.compile(rf"(taken over by process {os.getpid()}|process {os.getpid()} has taken it) at")
"""What a former owner is told, as it asks its ranks or before that."""
RUNS = 10_000


class Kernels:
    """Processes that start sessions, or attach to them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._sessions: list[Session] = []

    def start(self, code: str) -> subprocess.Popen[str]:
        """Run this until it says ``ready``."""
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def leave(self, code: str) -> None:
        """Run this, and kill its process when it says ``ready``."""
        process = self.start(f"{code}\nsay('ready')\ntime.sleep(60)")
        process.kill()
        process.wait()

    def attach(self, name: str, **options: Any) -> Session:
        session = Session.attach(name, **{"output": Recorder(), **options})
        self._sessions.append(session)
        return session

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    made = Kernels()
    yield made
    made.close()


def meet(session: Session) -> int:
    """How many ranks meet in a collective."""
    session.execute("met = torch.ones(1)\ndist.all_reduce(met)")
    return int(session.evaluate("int(met)")[0])


def processes_of(name: str) -> list[psutil.Process]:
    agents = [psutil.Process(pid) for pid in find_kept(name).agents]
    return [*agents, *(child for agent in agents for child in agent.children(recursive=True))]


# --- the lease ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["keep=2", "keep=60, keep_idle=1"])
def test_nothing_is_left_when_the_lease_is_over(kernels: Kernels, options: str) -> None:
    kernels.leave(f"Session(2, name='leased', {options})")
    folder = find_kept("leased").folder
    processes = processes_of("leased")
    assert len(processes) >= 3
    until(lambda: not any(process.is_running() for process in processes), "the end of all")
    until(lambda: not os.path.exists(folder), "the folder's end")
    why = "nobody had attached for 2s"
    if "idle" in options:
        why = "nobody had attached, and the ranks had been idle for 1s"
    said = rf"session leased \(2 ranks, gloo\) ended at \d\d:\d\d: {why}\."
    with pytest.raises(KeptSessionError, match=rf"^{said} Its variables are lost\.$"):
        Session.attach("leased")
    assert re.search(said, str(Session.list()))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seconds", [-0.1, 0.0, 0.1, 0.2, 0.3, 0.5])
def test_who_attaches_as_the_lease_ends_has_the_session_or_is_told_its_end(
    kernels: Kernels, seconds: float
) -> None:
    name = f"expires{seconds}"
    kernels.leave(f"Session(1, name={name!r}, keep=2)")
    processes = processes_of(name)
    left = find_kept(name).lease_left_s
    while left is None:  # its agent is just noticing
        left = find_kept(name).lease_left_s
    time.sleep(max(0.0, left + seconds))
    try:
        session = kernels.attach(name)
    except KeptSessionError as error:
        said = str(error)
    else:
        assert session.evaluate("rank") == {0: 0}
        return
    until(lambda: not any(process.is_running() for process in processes), "the end of all")
    assert said.startswith(f"session {name} (1 rank, gloo) ended at ")
    assert said.endswith(": nobody had attached for 2s. Its variables are lost.")


def process_with_pid(pid: int) -> subprocess.Popen[bytes]:
    """A process that has got the pid of another that has ended."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("nobody can say here which pid comes next")
    for _ in range(200):  # others start processes, too
        last.write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "60"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    pytest.skip("the pid could not be had again")


@pytest.mark.timeout(120)
def test_a_process_that_has_got_the_pid_of_the_owner_is_not_taken_for_it(kernels: Kernels) -> None:
    owner = kernels.start("s = Session(1, name='reused', keep=60)\nsay('ready')\ntime.sleep(60)")
    agent = find_kept("reused").agents[0]
    assert find_kept("reused").has_owner
    os.kill(agent, signal.SIGSTOP)  # so that it does not notice yet
    owner.kill()
    owner.wait()
    stranger = process_with_pid(owner.pid)
    try:
        assert find_kept("reused").owner is not None
        assert not find_kept("reused").has_owner
        os.kill(agent, signal.SIGCONT)
        session = kernels.attach("reused")
        assert session.evaluate("rank") == {0: 0}
        assert stranger.poll() is None
    finally:
        os.kill(agent, signal.SIGCONT)
        stranger.kill()
        stranger.wait()


@pytest.mark.timeout(120)
def test_a_process_that_has_got_the_pid_of_an_agent_is_left_alone(kernels: Kernels) -> None:
    kernels.leave("Session(1, name='agentless', keep=60)")
    kept = find_kept("agentless")
    agent = psutil.Process(kept.agents[0])
    agent.kill()
    until(lambda: not psutil.pid_exists(agent.pid), "the end of the agent")
    stranger = process_with_pid(agent.pid)
    try:
        with pytest.raises(KeptSessionError, match=r"agentless .* gone"):
            find_kept("agentless")
        assert not os.path.exists(kept.folder)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("end", ["lease", "stop"])
def test_one_who_has_said_a_byte_and_stays_holds_nothing_up(kernels: Kernels, end: str) -> None:
    kernels.leave(f"Session(1, name='byte', keep={3 if end == 'lease' else 60})")
    kept = find_kept("byte")
    processes = processes_of("byte")
    held = [unix_socket.connect(attach_path(kept.folder, 0)) for _ in range(3)]
    for each in held:
        each.sendall(b"\0")
    if end == "stop":
        end_session(kept, "it is enough")
    until(lambda: not any(process.is_running() for process in processes), "the end of all")
    for each in held:
        each.close()


def test_an_owner_that_stops_in_the_midst_of_a_message_can_be_taken_from(kernels: Kernels) -> None:
    owner = kernels.start(
        "session = Session(2, name='half', keep=60)\nsession.execute('value = rank')\n"
        "os.write(session.launcher._agents._links[0].fileno(), b'\\0\\0\\1\\0half')\n"
        "say('ready')\nsys.stdin.readline()\nattempt(lambda: session.execute('value = -1'))\n"
    )
    session = kernels.attach("half", take=True)
    assert dict(session.evaluate("value")) == {0: 0, 1: 1}
    assert meet(session) == 2
    said, _ = owner.communicate("go\n", timeout=60)
    assert "is no longer this process's: the agent has given it up, for not all of" in said
    assert dict(session.evaluate("value")) == {0: 0, 1: 1}


def test_nothing_is_left_of_a_session_whose_kernel_is_killed_as_it_starts(
    kernels: Kernels,
) -> None:
    process = kernels.start(
        "from distsession.cluster.local import LocalLauncher\n"
        "def wait(launcher):\n    say('ready')\n    time.sleep(60)\n"
        "LocalLauncher._write_state = wait\n"  # the last thing before it can be attached to
        "Session(2, name='early', keep=600)"
    )
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 3
    process.kill()
    until(lambda: not any(each.is_running() for each in left), "the end of all")


def test_ranks_that_work_are_not_idle(kernels: Kernels) -> None:
    kernels.leave(
        "session = Session(2, name='busy', keep=60, keep_idle=0.5)\n"
        "session.submit(time.sleep, 3)\n"
        "time.sleep(0.2)"
    )
    session = kernels.attach("busy")
    [future] = session.pending()
    assert future.result() == {0: None, 1: None}


def test_without_keep_everything_ends_with_its_kernel(kernels: Kernels) -> None:
    process = kernels.start("session = Session(2)\nsay('ready')\ntime.sleep(60)")
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 3
    process.kill()
    until(lambda: not any(each.is_running() for each in left), "the end of all")


# --- one owner ------------------------------------------------------------------------------------

OWNER = """
session = Session(2, name={name!r}, keep=60)
session.execute("value = 1")
say("ready")
sys.stdin.readline()
attempt(lambda: session.execute("value = 99"))
attempt(lambda: session.push(value=99))
attempt(lambda: session.restart())
attempt(lambda: session.interrupt())
say(session.status())
session.close()
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_who_is_replaced_as_the_owner_can_ask_nothing_any_more(
    kernels: Kernels, is_stopped: bool
) -> None:
    name = f"taken{is_stopped}"
    former = kernels.start(OWNER.format(name=name))
    with pytest.raises(SessionStateError, match=f"process {former.pid} has owned it since"):
        Session.attach(name)
    if is_stopped:
        former.send_signal(signal.SIGSTOP)
    session = kernels.attach(name, take=True)
    session.execute("value += 1")
    former.send_signal(signal.SIGCONT)
    said, _ = former.communicate("\n", timeout=60)
    *refusals, status = said.splitlines()
    assert len(refusals) == 4
    for refusal in refusals:
        assert TAKEN.search(refusal), refusal
    assert "taken over" in status
    assert session.evaluate("value") == {0: 2, 1: 2}
    assert meet(session) == 2


RESTARTING = """
from distsession.cluster.local import LocalLauncher
from distsession.cluster.monitor import Monitor
from distsession.kernel import transfer
from distsession.kernel.recovery import Recovery
session = Session(2, name={name!r}, keep=60)
session.execute("value = 1")
original = {place}
def taken_meanwhile(*args, **kwargs):
    found = original(*args, **kwargs)
    say("ready")
    while not session.launcher.taken:
        time.sleep(0.01)
    return found
{place} = taken_meanwhile
attempt(lambda: session.restart([1], restore="value"))
say(session.status())
"""


@pytest.mark.parametrize(
    "place",
    ["transfer.take", "Monitor.wait_exited", "LocalLauncher._launch", "Recovery.check_reach"],
)
def test_who_loses_it_in_a_restart_is_told_so_and_starts_no_other(
    kernels: Kernels, place: str
) -> None:
    name = f"restarting-{place.rpartition('.')[2]}"
    former = kernels.start(RESTARTING.format(name=name, place=place))
    session = kernels.attach(name, take=True)
    said, _ = former.communicate(timeout=60)
    refusal, status = (line for line in said.splitlines() if line != "ready")
    assert TAKEN.search(refusal), refusal
    assert "taken over" in status
    if dead := sorted(session.launcher.dead_ranks()):
        session.restart(dead, restore="value")
    assert session[0].evaluate("value") == {0: 1}
    assert meet(session) == 2


ANSWERED = """
session = Session(2, name={name!r}, keep=60)
session.execute("import os, sys, threading, time")
code = '''
held = sys.stdout._capture._pump_lock  # its output waits here, and its answer does not
held.acquire()
def release():
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    held.release()
threading.Thread(target=release).start()
print("the last line")
'''
def watch():
    while not (pending := session.channel.pending()) or pending[0].missing:
        time.sleep(0.01)
    say("ready")
threading.Thread(target=watch).start()
attempt(lambda: session.execute(code))
"""


def test_a_run_whose_last_output_is_taken_over_is_told_as_such(
    kernels: Kernels, tmp_path: Path
) -> None:
    """Its answers are here already; it is not done without its output."""
    go = tmp_path / "go"
    former = kernels.start(ANSWERED.format(name="answered", go=str(go)))
    attaching = threading.Timer(1, go.touch)
    attaching.start()
    recorder = Recorder()
    session = kernels.attach("answered", take=True, output=recorder)
    attaching.join()
    said, _ = former.communicate(timeout=60)
    assert TAKEN.search(said), said
    session.follow()
    assert [recorder.text(rank) for rank in range(2)] == ["the last line\n"] * 2


def test_two_who_attach_at_once_do_not_both_own_it(kernels: Kernels) -> None:
    kernels.leave("Session(1, name='contended', keep=60)")
    attach = "attempt(lambda: Session.attach('contended'))\nsys.stdin.readline()"
    both = [kernels.start(f"say('ready')\nsys.stdin.readline()\n{attach}") for _ in range(2)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = []
    for process in both:
        assert process.stdout is not None
        said.append(process.stdout.readline())
    assert sorted("has owned it since" in line for line in said) == [False, True], said
    kernels.attach("contended", take=True)


def test_an_agent_that_is_stopped_is_named_and_a_slow_one_waited_for(kernels: Kernels) -> None:
    kernels.leave("Session(1, name='slow', keep=60)")
    [agent] = find_kept("slow").agents
    os.kill(agent, signal.SIGSTOP)
    try:
        with pytest.raises(SessionStateError, match=rf"\(pid {agent}\) is stopped .*kill -CONT"):
            kernels.attach("slow")
    finally:
        goes_on = threading.Timer(0.3, os.kill, (agent, signal.SIGCONT))
        goes_on.start()
    assert meet(kernels.attach("slow")) == 1
    goes_on.join()


def test_a_session_may_have_many_owners_one_after_the_other(kernels: Kernels) -> None:
    kernels.leave("Session(2, name='old', keep=60).execute('value = [0]')")
    for count in range(1, 20):
        session = kernels.attach("old")
        session.submit(exec, "import __main__; __main__.value.append(len(__main__.value))")
        session.detach()
        assert find_kept("old").owner is not None
        session = kernels.attach("old")
        for future in session.pending():
            future.result()
        assert session.evaluate("value")[1] == list(range(count + 1))
        session.detach()
    assert meet(kernels.attach("old")) == 2


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_large_answers_wait_for_who_attaches_and_are_let_go_of_then(
    kernels: Kernels, nodes: int
) -> None:
    name = f"large{nodes}"
    kernels.leave(
        f"session = Session(2, name={name!r}, keep=60, nodes={nodes})\n"
        "session.submit(time.sleep, 0.5)\n"
        "for number in range(3):\n"
        "    session.submit(lambda i: bytes([i]) * 3_000_000, number)\n"
        "time.sleep(0.1)"
    )
    session = kernels.attach(name)
    _, *values = [future.result() for future in session.pending()]
    assert [dict(value) for value in values] == [
        dict.fromkeys(range(2), bytes([i]) * 3_000_000) for i in range(3)
    ]
    pid = session.infos[0].pid

    def segments() -> list[str]:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()]
        return [link for link in links if "distsession-board" not in link and "memfd" in link]

    until(lambda: not segments(), f"the end of what was kept: {segments()}")
    session.push(blob=b"x" * 3_000_000)
    assert [len(value) for value in session.evaluate("blob").values()] == [3_000_000] * 2
    assert meet(session) == 2


def test_a_rank_that_died_while_nobody_was_there_is_known_and_replaced(kernels: Kernels) -> None:
    kernels.leave(
        "session = Session(2, name='wounded', keep=60)\n"
        "session.execute('value = rank')\n"
        "session[1].submit(lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL)))\n"
        "time.sleep(0.1)"
    )
    session = kernels.attach("wounded")
    until(lambda: "rank 1 is dead" in session.status(), "the death of rank 1")
    session.restart([1])
    assert session[0].evaluate("value") == {0: 0}
    assert meet(session) == 2


def test_a_kernel_that_ends_in_the_midst_of_a_restart_leaves_ranks_that_can_be_restarted(
    kernels: Kernels,
) -> None:
    kernels.leave(
        "session = Session(2, name='halfway', keep=60)\n"
        "session.execute('value = rank')\n"
        "session.launcher._launch = lambda *args: (say('ready'), time.sleep(60))\n"
        "session.restart([1])"
    )
    session = kernels.attach("halfway")
    assert "rank 1 is dead" in session.status()
    session.restart([1])
    assert session[0].evaluate("value") == {0: 0}
    assert meet(session) == 2


@pytest.mark.parametrize("then", ["restart", "run"])
def test_a_rank_that_waits_for_one_that_was_never_started_is_freed(
    kernels: Kernels, then: str
) -> None:
    kernels.leave(
        "import threading\n"
        "session = Session(2, name='met', keep=60)\n"
        "session.execute('value = rank')\n"
        "session.launcher._fork = lambda *args: None\n"
        "session.launcher._monitor.wait_ready = lambda *args: time.sleep(60)\n"
        "threading.Thread(target=lambda: session.restart([1]), daemon=True).start()\n"
        "while not session.launcher.channel.is_busy(0): time.sleep(0.001)\n"
        "time.sleep(0.3)\n"
    )
    session = kernels.attach("met")
    assert "rank 1 is dead" in session.status()
    if then == "run":
        assert session[0].evaluate("value", timeout=30) == {0: 0}
    session.restart([1])
    assert session[0].evaluate("value") == {0: 0}
    assert meet(session) == 2


def test_a_rank_in_c_code_that_lets_no_thread_run_is_waited_for(kernels: Kernels) -> None:
    kernels.leave(
        "session = Session(2, name='locked', keep=60)\n"
        "session.execute('import ctypes, time\\nvalue = rank')\n"
        "session.submit(lambda: (rank and __import__('ctypes').PyDLL(None).sleep(9), 'done')[1])\n"
        "time.sleep(0.3)"
    )
    session = kernels.attach("locked")
    assert not session.launcher.dead_ranks()
    [future] = session.pending()
    assert future.result(60) == {0: "done", 1: "done"}
    assert meet(session) == 2
    assert session.evaluate("value") == {0: 0, 1: 1}


def test_what_only_a_rank_in_c_code_was_asked_is_waited_for_and_not_said_to_be_lost(
    kernels: Kernels,
) -> None:
    kernels.leave(
        "session = Session(2, name='held', keep=60)\n"
        "session.execute('import ctypes, time\\nran = 0')\n"
        "def hold():\n"
        "    import __main__\n"
        "    __import__('ctypes').PyDLL(None).sleep(9)\n"
        "    __main__.ran += 1\n"
        "    return 'held'\n"
        "def count():\n"
        "    return __import__('__main__').ran\n"
        "session[1].submit(hold)\n"
        "session[1].submit(count)\n"
        "time.sleep(0.5)"
    )
    said: list[str] = []
    session = kernels.attach("held")
    session.follow(said.append)
    assert not said
    assert [future.result(60) for future in session.pending()] == [{1: "held"}, {1: 1}]
    assert meet(session) == 2


def test_a_broken_group_is_connected_anew_by_who_attaches(kernels: Kernels) -> None:
    kernels.leave(
        "session = Session(2, name='broken', keep=60)\n"
        "session.execute('value = rank')\n"
        "session.launcher.abort('stop', 'it was stopped')\n"
        "time.sleep(0.3)"
    )
    session = kernels.attach("broken")
    assert meet(session) == 2
    assert session.evaluate("value") == {0: 0, 1: 1}


def test_a_session_that_was_kept_all_day_holds_no_more_than_a_young_one(
    start: Callable[..., Session],
) -> None:
    session = start(2, keep=60, output=Recorder())
    ranks = [psutil.Process(info.pid) for info in session.infos]

    def memory() -> int:
        return sum(rank.memory_info().rss for rank in ranks)

    for _ in range(RUNS // 10):
        session.run(len, (1, 2))
    session.run(bytes, 3_000_000)
    before, descriptors = memory(), [rank.num_fds() for rank in ranks]
    for _ in range(RUNS):
        session.run(len, (1, 2))
    session.run(bytes, 3_000_000)
    session.run(len, ())
    assert memory() - before < 8 << 20
    until(lambda: all(r.num_fds() <= n + 1 for r, n in zip(ranks, descriptors, strict=True)))
    folder = Path(session.launcher.folder)
    assert sum(path.stat().st_size for path in folder.glob("journal*")) < 16 << 20


def test_the_numbers_of_requests_go_on_over_all_owners(kernels: Kernels) -> None:
    kernels.leave("Session(1, name='numbered', keep=60).execute('value = 0')")
    highest = 0
    for _ in range(3):
        session = kernels.attach("numbered")
        pending = session.channel.pending()
        assert not pending
        session.execute("value += 1")
        assert session.last_run is not None
        assert session.last_run.number > highest
        highest = session.last_run.number
        session.detach()
    kernels.attach("numbered")


def test_many_ranks_are_attached_to_beside_busy_loops(kernels: Kernels) -> None:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        kernels.leave(
            "session = Session(32, name='many', keep=120, threads=1)\n"
            "session.submit(lambda: (time.sleep(1), print('out'), 'value')[-1])\n"
            "time.sleep(0.2)"
        )
        session = kernels.attach("many")
        [future] = session.pending()
        assert set(future.result(60).values()) == {"value"}
        assert meet(session) == 32
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_an_agent_that_ends_as_it_is_attached_to_is_named(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.leave("Session(1, name='ending', keep=60)")
    kept = find_kept("ending")
    (pid,) = kept.agents

    connect = attachment.connect

    def connect_to_one_that_ends(*args: Any, **kwargs: Any) -> Any:
        made = connect(*args, **kwargs)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(pid), "its end")
        return made

    monkeypatch.setattr(attachment, "connect", connect_to_one_that_ends)
    with pytest.raises(SessionStateError, match=f"pid {pid}.* has ended as it was attached to"):
        kernels.attach("ending")
    base = os.path.dirname(kept.folder)
    until(lambda: folder_lock.sweep(base) or not os.path.exists(kept.folder), "the folder's end")
