"""From the start of a session to its end, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from distsession import (
    LaunchError,
    LaunchTimeoutError,
    OptionsError,
    RunError,
    Session,
    SessionStateError,
    current_session,
)
from distsession.devices import NCCL_CLASSES_TORCH, NCCL_NAMES
from distsession.engine.host_info import torch_release
from tests.conftest import assert_nothing_left, traces
from tests.until import LIMIT_S, until_settled
from tests.until import until as wait_until

from .conftest import Recorder


@pytest.fixture(autouse=True)
def _nothing_left_after_each_test():
    before = traces()
    yield
    assert_nothing_left(before)


def run_script(text: str, **more) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def until(process: subprocess.Popen[str], word: str) -> str:
    """Read a process's output up to a line with this word."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if word in line:
            return line
    raise AssertionError(f"no {word!r} in:\n{seen}")


def until_agent(process: subprocess.Popen[str]) -> None:
    """Wait until a kernel has started its agent, which is to import torch yet."""
    wait_until(lambda: any(map(is_agent, psutil.Process(process.pid).children())))


def is_agent(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("distsession.engine.agent" in part for part in process.cmdline())
    return False


# --- start ----------------------------------------------------------------------------------------


def test_without_a_number_there_is_a_rank_per_gpu_or_two(start) -> None:
    session = start()
    gpus = [info for info in session.infos if info.device.device.startswith("cuda")]
    assert session.world_size == (len(gpus) or 2)


@pytest.mark.usefixtures("cold_agents")
def test_the_group_is_ready_when_the_constructor_returns(start) -> None:
    session = start(3)
    assert [info.rank for info in session.infos] == [0, 1, 2]
    assert {info.backend for info in session.infos} == {"gloo"}
    assert len({info.pid for info in session.infos}) == 3
    assert session.evaluate("dist.get_world_size()")[2] == 3


def test_starting_a_session_does_not_bring_torch_into_the_kernel() -> None:
    process = run_script(
        """
        import sys
        from distsession import Session
        with Session(2) as session:
            session.run(max, 1, 2)
            session.execute("torch.ones(2).sum()")
            print("torch" in sys.modules)
        """
    )
    output = process.communicate(timeout=60)[0]
    assert output.split()[-1] == "False", output


@pytest.mark.usefixtures("cold_agents")
def test_options_arrive(start) -> None:
    session = start(2, seed=7, threads=3, timeout=77, preload=["json.tool"])
    assert len(set(session.evaluate("torch.rand(1).item()").values())) == 1
    assert session.evaluate("torch.get_num_threads()")[0] == 3
    assert session.evaluate("__import__('os').environ['OMP_NUM_THREADS']")[1] == "3"
    assert session.evaluate("'json.tool' in __import__('sys').modules")[1] is True
    limit = "dist.distributed_c10d._get_default_group()._get_backend(device).options._timeout"
    assert session.evaluate(f"{limit}.total_seconds()")[0] == 77


def test_a_seed_can_differ_by_rank(start) -> None:
    session = start(2, seed=7, seed_per_rank=True)
    first, second = session.evaluate("torch.initial_seed()").values()
    assert (first, second) == (7, 8)


def test_threads_are_shared_out(start) -> None:
    session = start(2)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert list(session.evaluate("torch.get_num_threads()").values()) == [share, share]


def test_a_backend_for_each_device_type_is_passed_through(start) -> None:
    session = start(2, backend="cpu:gloo")
    assert session.evaluate("dist.get_backend()")[0] == "cpu:gloo"
    session.execute("dist.barrier()")


def test_two_sessions_are_independent(start) -> None:
    first, second = start(2), start(1)
    first.execute("x = 'first'")
    second.execute("x = 'second'")
    assert first.evaluate("x")[1] == "first"
    assert second.evaluate("x")[0] == "second"
    assert current_session() is second
    first.activate()
    assert current_session() is first
    first.close()
    assert current_session() is second
    assert second.evaluate("x")[0] == "second"


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, -1, 2.5, "four"])
def test_an_impossible_number_of_ranks_is_refused(ranks) -> None:
    with pytest.raises(OptionsError, match="ranks="):
        Session(ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nothing"}, "'nothing' is not one that this torch"),
        ({"devices": [0, 99]}, "GPU"),
        ({"backned": "gloo"}, "Did you mean backend"),
        ({"launcher": "rocket"}, "one of local, inline"),
        ({"ranks": 2, "launcher": "inline"}, "one rank"),
    ],
)
def test_an_impossible_option_is_refused(options, message) -> None:
    with pytest.raises(OptionsError, match=message):
        Session(**options)


def nccl_refusal(backend: str) -> str:
    """Why a machine has no 99 GPUs for it, or its torch no such class."""
    has_classes = torch_release() >= NCCL_CLASSES_TORCH
    return "GPU" if has_classes or backend == "nccl" else r"from 2\.15 on"


@pytest.mark.parametrize("backend", NCCL_NAMES)
def test_nccl_without_enough_gpus_is_refused(backend: str) -> None:
    with pytest.raises(OptionsError, match=nccl_refusal(backend)):
        Session(99, backend=backend)
    with pytest.raises(OptionsError, match=nccl_refusal(backend)):
        Session(99, backend=f"cpu:gloo,cuda:{backend}")


@pytest.mark.usefixtures("cold_agents")
def test_a_preload_module_that_does_not_import_is_named() -> None:
    with pytest.raises(LaunchError, match="no_such_module_here"):
        Session(1, preload=["no_such_module_here"])


@pytest.mark.usefixtures("cold_agents")
def test_a_preload_module_that_starts_threads_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, "
        "name='of the module').start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaunchError, match=r"of the module.*starts_a_thread"):
        Session(1, preload=["starts_a_thread"])


@pytest.mark.usefixtures("cold_agents")
def test_an_engine_that_dies_while_starting_shows_its_last_lines(tmp_path, monkeypatch) -> None:
    # the hook runs in the forked rank alone
    (tmp_path / "dies_after_fork.py").write_text(
        "import os, sys\n"
        "def die():\n"
        "    os.write(2, b'the reason is here\\n')\n"
        "    os._exit(5)\n"
        "def hook(*a, **k):\n"
        "    die()\n"
        "import torch.distributed\n"
        "torch.distributed.init_process_group = hook\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaunchError, match=r"exit code 5(.|\n)*the reason is here"):
        Session(2, preload=["dies_after_fork"])


def test_a_group_that_cannot_be_joined_says_why(tmp_path, monkeypatch) -> None:
    (tmp_path / "refuses_to_join.py").write_text(
        "import torch.distributed\n"
        "def hook(*a, **k):\n"
        "    raise RuntimeError('no route to the group')\n"
        "torch.distributed.init_process_group = hook\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaunchError, match="process group: RuntimeError: no route to the group"):
        Session(2, preload=["refuses_to_join"])


@pytest.mark.usefixtures("cold_agents")
def test_a_start_that_takes_too_long_is_given_up(tmp_path, monkeypatch) -> None:
    (tmp_path / "very_slow_module.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.monotonic()
    with pytest.raises(LaunchTimeoutError, match="start_timeout=2 s"):
        Session(1, preload=["very_slow_module"], start_timeout=2)
    assert time.monotonic() - began < 45


@pytest.mark.usefixtures("cold_agents")
def test_a_long_start_says_what_it_waits_for(start, tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    output = Recorder()
    start(1, preload=["slow_to_import"], output=output)
    assert output.notices[0].startswith(
        "starting the ranks, waiting for torch, slow_to_import to be imported ("
    )


def test_a_long_restart_says_which_ranks_it_waits_for(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    (tmp_path / "slow_fork.py").write_text(
        "import os, time\n"
        f"def wait(): time.sleep(2.0 if os.path.exists({str(slow)!r}) else 0.0)\n"
        "os.register_at_fork(after_in_child=wait)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    output = Recorder()
    session = start(2, output=output, preload=["slow_fork"])
    output.clear()
    slow.touch()
    session.restart([1])
    slow.unlink()
    assert any(text.startswith("restarting rank 1") for text in output.notices), output.notices
    assert dict(session.evaluate("rank")) == {0: 0, 1: 1}


def test_a_call_on_a_closed_session_is_refused() -> None:
    session = Session(1)
    view = session[0]
    session.close()
    session.close()
    for call in (
        lambda: session.run(len, ()),
        lambda: view.run(len, ()),
        lambda: session.execute("1"),
        session.restart,
        session.show_config,
        lambda: session.client,
    ):
        with pytest.raises(SessionStateError, match="closed"):
            call()
    assert "closed" in repr(session)
    with pytest.raises(SessionStateError, match="no session is open"):
        current_session()


def test_a_forked_copy_of_the_kernel_cannot_use_the_session(start) -> None:
    session = start(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            session.close()  # does nothing here
            session.run(len, ())
        except SessionStateError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session.run(len, ())[0] == 0


# --- restart --------------------------------------------------------------------------------------


def test_restart_gives_fresh_ranks(start) -> None:
    session = start(2)
    session.execute("x = 1")
    before = {info.pid for info in session.infos}
    session.restart()
    assert before.isdisjoint(info.pid for info in session.infos)
    with pytest.raises(RunError, match="NameError"):
        session.evaluate("x")
    session.execute("t = torch.ones(1)\ndist.all_reduce(t)")
    assert session.evaluate("t.item()")[0] == 2.0


def test_restart_of_one_rank_keeps_the_others(start) -> None:
    session = start(3)
    session.execute("x = rank")
    pids = [info.pid for info in session.infos]
    session.restart([1])
    now = [info.pid for info in session.infos]
    assert (now[0], now[2]) == (pids[0], pids[2])
    assert now[1] != pids[1]
    assert dict(session[[0, 2]].evaluate("x")) == {0: 0, 2: 2}
    session.execute("t = torch.ones(1)\ndist.all_reduce(t)")
    assert list(session.evaluate("t.item()").values()) == [3.0] * 3


def test_restart_while_a_rank_hangs(start) -> None:
    session = start(2)
    future = session[0].submit(lambda: __import__("torch").distributed.barrier())
    until_settled(session)
    session.restart()
    with pytest.raises(RunError, match="rank 0"):
        future.result(LIMIT_S)
    assert session.evaluate("dist.get_rank()")[1] == 1


def test_restart_many_times_leaves_nothing_open(start) -> None:
    session = start(2)
    session.restart()
    kernel = psutil.Process()
    agent = next(p for p in kernel.children() if "engine.agent" in " ".join(p.cmdline()))
    session.execute("1")
    counts = kernel.num_fds(), kernel.num_threads(), agent.num_fds()
    for _ in range(10):
        session.restart()
    session.execute("1")
    assert agent.num_fds() <= counts[2]
    assert kernel.num_fds() <= counts[0] + 2
    assert kernel.num_threads() <= counts[1] + 1


@pytest.mark.usefixtures("cold_agents")
def test_the_end_of_the_agent_is_said_and_restart_brings_all_back(start) -> None:
    session = start(2)
    future = session.submit(time.sleep, 60)
    agent = psutil.Process(session.infos[0].pid).parent()
    assert agent is not None
    agent.kill()
    with pytest.raises(RunError, match="agent"):
        future.result(LIMIT_S)
    assert "agent is gone" in session.status()
    session.restart()
    assert session.evaluate("rank")[1] == 1


# --- end ------------------------------------------------------------------------------------------


def test_close_leaves_nothing_whatever_runs() -> None:
    before = traces()
    session = Session(2)
    session.client  # noqa: B018  with ipyparallel's part connected
    future = session.submit(time.sleep, 600)
    session.execute  # noqa: B018
    session.close()
    assert_nothing_left(before)
    with pytest.raises((RunError, SessionStateError)):
        future.result(5)


def test_leaving_the_with_block_closes() -> None:
    before = traces()
    with Session(2) as session:
        session.execute("1")
    assert_nothing_left(before)
    assert not session.is_open


def test_what_the_ranks_started_ends_with_them(start) -> None:
    session = start(1)
    session.execute("import subprocess\nchild = subprocess.Popen(['sleep', '600'])")
    child = psutil.Process(session.evaluate("child.pid")[0])
    session.close()
    child.wait(5)


def test_exit_functions_of_a_rank_run(start, tmp_path) -> None:
    session = start(1)
    path = tmp_path / "said goodbye"
    session.execute(f"import atexit, pathlib\natexit.register(pathlib.Path({str(path)!r}).touch)")
    session.close()
    assert path.exists()


def test_the_interpreters_exit_closes() -> None:
    before = traces()
    process = run_script("from distsession import Session\ns = Session(2)\ns.execute('print(1)')\n")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert "[0] 1" in output
    assert "Traceback" not in output
    assert_nothing_left(before)


@pytest.mark.alone
@pytest.mark.parametrize("busy", [False, True])
def test_sigkill_of_the_kernel_leaves_nothing_after_two_seconds(busy: bool) -> None:
    before = traces()
    work = "s.submit(__import__('time').sleep, 600)" if busy else "s.client"
    process = run_script(
        f"""
        import time
        from distsession import Session
        s = Session(2)
        {work}
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    until(process, "ready")
    process.kill()
    process.wait()
    assert_nothing_left(before, within=2.0)
    assert process.stdout is not None
    process.stdout.close()


def test_sigkill_of_the_kernel_while_it_starts() -> None:
    before = traces()
    process = run_script(
        "from distsession import Session\nprint('begin', flush=True)\nSession(2)\nimport time\n"
        "time.sleep(600)\n"
    )
    until(process, "begin")
    until_agent(process)  # before, it is the next start that removes the folder
    process.kill()
    process.wait()
    assert_nothing_left(before)  # the agent first has to end its import of torch
    assert process.stdout is not None
    process.stdout.close()


def test_ctrl_c_while_starting_leaves_nothing() -> None:
    before = traces()
    process = run_script(
        """
        from distsession import Session
        print("begin", flush=True)
        try:
            Session(2)
        except KeyboardInterrupt as e:
            print("interrupted", e._render_traceback_())
        """
    )
    until(process, "begin")
    until_agent(process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=100)[0]
    assert "interrupted ['KeyboardInterrupt: the start was stopped.']" in said
    assert_nothing_left(before)


def test_ctrl_c_stops_a_run_and_the_session_goes_on() -> None:
    process = run_script(
        """
        import time
        from distsession import Session
        with Session(2) as s:
            s.execute("kept = 3")
            print("ready", flush=True)
            try:
                s.run(time.sleep, 600)
            except KeyboardInterrupt as e:
                print(type(e).__name__, e)
            print(s.evaluate("kept"))
        """
    )
    until(process, "ready")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=100)[0]
    assert "RunInterrupt the run on ranks 0-1 was stopped: ranks 0-1 were at sleep." in output
    assert "[ranks 0-1] 3" in output


# --- where it lives -------------------------------------------------------------------------------


def test_everything_is_in_a_folder_that_only_the_user_can_open(start) -> None:
    session = start(1)
    folder = Path(session.launcher.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name for path in folder.iterdir()}
    sockets = ("agent", "requests", "output", "control")
    assert {f"{name}-1.sock" for name in sockets} <= names


def test_a_long_tmpdir_is_no_obstacle(tmp_path, monkeypatch, start) -> None:
    import tempfile

    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert start(1).evaluate("rank")[0] == 0


def test_config_and_devices_are_text_and_html(start) -> None:
    session = start(2)
    for table in (session.show_config(), session.devices()):
        assert session.infos[1].host in repr(table)
        assert "<table>" in table._repr_html_()
    config = repr(session.show_config())
    for word in ("backend", "gloo", "world size", "ranks per node", "local rank", "node rank"):
        assert word in config
