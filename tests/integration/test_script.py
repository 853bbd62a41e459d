"""``distsession run``: scripts on ranks, their exit codes, and that nothing of them stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from distsession.cli import main
from distsession.cluster.kept import find_kept
from tests.conftest import assert_nothing_left, traces
from tests.until import until

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

DDP = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from side import SCALE

    def main():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        loss = model(torch.ones(4, 2) * (rank + 1) * SCALE).sum()
        loss.backward()
        gradient = model.module.weight.grad.flatten().tolist()
        name = os.path.basename(__file__)
        sys.stdout.write(f"gradient {gradient} {sys.argv[1:]} {__name__} {name}\\n")  # in one piece
        sys.stdout.flush()
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


@pytest.fixture(autouse=True)
def _nothing_left_after_each_test():
    before = traces()
    yield
    assert_nothing_left(before)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "side.py").write_text("SCALE = 2\n")

    def make(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return make


def environment():
    return {**os.environ, "PYTHONPATH": ROOT}


def started(*arguments, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "distsession", "run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **more,
    )


STARTING = r"^distsession: starting the ranks.*\n"
"""What a machine that is busy has it say meanwhile."""


def ended(*arguments, timeout=100, **more):
    process = started(*arguments, **more)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        pytest.fail(f"it did not end: {process.communicate()}")
    return process.returncode, out, re.sub(STARTING, "", err, flags=re.M)


def torchrun(*arguments, timeout=100):
    """The same by torch's own launcher.

    As Python ends, threads of torch's gloo (2.13) abort one in ten scripts, whoever runs them. Such
    a run is done again.
    """
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment(),
            check=False,
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    return done.returncode, done.stdout, done.stderr


def test_a_script_of_torchrun_runs_as_there(script):
    path = script(DDP)
    code, out, err = ended("--plain", "-n", "2", path, "--lr", "0.1")
    expected, there, theirs = torchrun("--nproc-per-node=2", path, "--lr", "0.1")

    assert (code, expected) == (0, 0), err + theirs
    assert sorted(out.splitlines()) == sorted(there.splitlines())
    assert "gradient [12.0, 12.0] ['--lr', '0.1'] __main__ train.py" in out


def test_lines_are_marked_with_their_rank(script):
    path = script("import os\nprint('here is', os.environ['RANK'])\n")
    code, out, _ = ended("--ranks", "3", path)

    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}] here is {rank}" for rank in range(3)]


def test_python_would_set_the_same(script, tmp_path):
    text = """
        import sys, os, pickle, __main__
        class Thing:
            pass
        thing = pickle.loads(pickle.dumps(Thing()))
        print(sys.argv, sys.path[0], __file__, __name__, __spec__, type(thing).__module__,
              __main__.Thing is Thing, os.getcwd())
    """
    path = script(text)
    code, out, err = ended("--plain", "-n", "1", "train.py", "-n", "3", cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "train.py", "-n", "3"],
        capture_output=True, text=True, cwd=tmp_path, timeout=100, check=True,
    )  # fmt: skip

    assert code == 0, err
    assert out == done.stdout
    assert path in out


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("1 / 0", 1, "ZeroDivisionError on rank 1"),
        ("sys.exit(3)", 3, "rank 1 ended with exit code 3"),
        ("sys.exit('no data')", 1, "rank 1: no data"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
        ("os._exit(7)", 7, "ended with exit code 7"),
    ],
)
def test_the_first_failure_gives_the_exit_code(script, body, code, message):
    path = script(
        f"""
        import os, sys
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()  # gloo writes a line where a rank ends while others connect to it
        if dist.get_rank() == 1:
            {body}
        dist.all_reduce(torch.ones(1))
        """
    )
    got, _, err = ended("-n", "2", path)

    assert got == code, err
    assert message in err
    assert "session.restart" not in err
    assert "connected anew" not in err
    first = err.splitlines()[0]
    assert "rank 1" in first


def test_an_error_shows_the_line_of_the_script(script):
    path = script("import torch\n\ndef f():\n    raise ValueError('no')\n\nf()\n")
    code, _, err = ended("-n", "2", path)

    assert code == 1
    assert err.startswith("distsession run: ValueError on ranks 0-1")
    assert "raise ValueError('no')" in err
    assert "train.py, line 4, in f" in err
    assert "engine/script.py" not in err


def test_a_script_that_cannot_be_compiled_says_where(script):
    code, _, err = ended("-n", "2", script("x = (\n"))

    assert code == 1
    assert "SyntaxError on ranks 0-1" in err
    assert "train.py" in err


def test_an_exit_code_of_nothing_is_no_failure(script):
    assert ended("-n", "2", script("import sys\nsys.exit()\n"))[0] == 0


def test_a_hang_is_diagnosed(script):
    path = script(
        """
        import torch
        import torch.distributed as dist

        dist.init_process_group()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        """
    )
    code, _, err = ended("-n", "2", "--hang-grace", "0.5", path)

    assert code == 1
    assert "all_reduce" in err
    assert "train.py line 7" in err
    assert "rank 1" in err


def test_a_mismatch_is_named(script):
    path = script(
        """
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1 + dist.get_rank()))
        """
    )
    code, _, err = ended("-n", "2", path)

    assert code == 1
    assert err.startswith("distsession run: CollectiveMismatchError: rank 0 called all_reduce")


def test_a_rank_that_goes_on_after_a_failure_is_ended(script):
    path = script(
        """
        import os, time
        if os.environ["RANK"] == "0":
            raise ValueError("no")
        time.sleep(1000)
        """
    )
    began = time.monotonic()
    code, _, err = ended("-n", "2", "--hang-grace", "0", path)

    assert code == 1
    assert err.startswith("distsession run: ValueError on rank 0")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_everything(script, number, code):
    path = script(
        """
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print("ready", flush=True)
        if dist.get_rank() == 0:
            dist.barrier()
        while True:
            pass
        """
    )
    process = started("-n", "2", path)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)

    assert process.returncode == code, err
    if number == signal.SIGINT:
        assert "barrier" in err


@pytest.mark.parametrize("is_named", [True, False])
def test_a_kept_script_goes_on_when_its_terminal_is_closed(script, is_named):
    path = script(
        """
        import time
        print("ready", flush=True)
        for number in range(10**6):
            print("line", number, flush=True)
            time.sleep(0.01)
        """
    )
    flags = ["--name", f"script-{os.getpid()}"] if is_named else []
    process = started("-n", "2", "--keep", "600s", *flags, path)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=100)
    found = re.search(r"run: (\S+) goes on: `distsession attach (\S+)` shows it\.", err)
    assert found is not None, err
    assert found[1] == found[2]
    name = found[1]
    try:
        assert process.returncode == 129, err
        log = Path(find_kept(name).folder) / "logs/rank1-0.out"
        lines = log.read_bytes().count(b"\n")
        until(lambda: log.read_bytes().count(b"\n") > lines + 50)
        assert not find_kept(name).has_owner
    finally:
        assert main(["stop", name]) == 0


def test_a_kept_script_that_has_ended_leaves_nothing(script):
    path = script("print('done')")
    code, out, err = ended("-n", "2", "--keep", "600s", path)
    assert (code, sorted(out.splitlines())) == (0, ["[0] done", "[1] done"]), err


def test_threads_of_the_script_are_waited_for(script):
    path = script(
        """
        import threading, time

        def late():
            time.sleep(0.5)
            print("late")

        threading.Thread(target=late).start()
        """
    )
    code, out, _ = ended("--plain", "-n", "2", path)

    assert (code, out) == (0, "late\nlate\n")


def test_a_data_loader_with_processes_works(script):
    path = script(
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index

        if __name__ == "__main__":
            print(sum(int(b.sum()) for b in DataLoader(Numbers(), batch_size=2, num_workers=2)))
        """
    )
    code, out, err = ended("--plain", "-n", "2", path)

    assert (code, out) == (0, "6\n6\n"), err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.py"], 2, "there is no script none.py"),
        (["--launcher", "inline", __file__], 2, "a script is not run inline"),
        (["--backend", "none", __file__], 2, "backend 'none' is not one"),
        (["--start-timeout", "0.01", __file__], 1, "the agent did not come up"),
        (["-n", "two", __file__], 2, "'two' cannot be read: it takes a whole number"),
        ([], 2, "required: SCRIPT.py"),
    ],
)
def test_what_cannot_start_says_so(arguments, code, message):
    got, _, err = ended(*arguments)

    assert got == code, err
    assert message in err


@pytest.mark.timeout(180)
def test_without_numpy_torch_says_so_once(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    script = tmp_path / "script.py"
    script.write_text(
        "from distsession import Session\n"
        "with Session(2, backend='gloo') as session:\n"
        "    for _ in range(2):\n"
        "        session.execute('t = torch.ones(2)')\n"
        "        print(session.evaluate('t')[0].tolist())\n"
        "        session.restart()\n"
    )
    paths = os.pathsep.join(filter(None, (str(hidden), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    assert ran.stdout == "[1.0, 1.0]\n" * 2
    assert ran.stderr.count("Failed to initialize NumPy") == 1
