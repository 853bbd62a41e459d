"""Scripts written from what ran on real ranks, started as jobs are."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from distsession import ExportError, RunError, Session
from tests.integration.kernel import Notebook

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

CELLS = (
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "torch.manual_seed(rank)\n"
    "data = torch.randn(64, 3)\n"
    "target = data.sum(1, keepdim=True)",
    "torch.manual_seed(0)\nmodel = DDP(torch.nn.Linear(3, 1))\n"
    "optim = torch.optim.SGD(model.parameters(), lr=0.1)\nlosses = []",
    "for epoch in range(5):\n"
    "    optim.zero_grad()\n"
    "    loss = ((model(data) - target) ** 2).mean()\n"
    "    loss.backward()\n"
    "    optim.step()\n"
    "    losses.append(loss.item())\n"
    "losses[-1]",
)


@pytest.fixture(scope="module")
def shared():
    from distsession.view import Silent

    with Session(2, output=Silent, seed=0, backend="gloo") as session:
        yield session


@pytest.fixture
def session(shared):
    """Ranks on which nothing has run, and so nothing to export."""
    shared.restart()
    return shared


def started(*command, cwd) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": ROOT},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_training_gives_the_same_as_a_job(session, tmp_path):
    for cell in CELLS:
        session.execute(cell)
    session.run(len, [1, 2])
    session[0].execute("print('FINAL', losses[-1])")
    losses = session.evaluate("losses[-1]")

    script = session.export(tmp_path / "train.py")
    found = session.check_export(script, ["losses", "model", "optim", "data"])

    assert found == {"losses": 0.0, "model": 0.0, "optim": 0.0, "data": 0.0}
    for command in (
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"],
        ["distsession", "run", "--plain", "-n", "2", "train.py"],
    ):
        out = started(*command, cwd=tmp_path)
        [line] = [line for line in out.splitlines() if "FINAL" in line]
        assert float(line.split()[-1]) == pytest.approx(losses[0], rel=1e-5)
    assert "FINAL" in (alone := script.read_text())
    assert "%distributed losses[-1]" in alone


def test_a_script_runs_alone_too(session, tmp_path):
    session.execute("t = torch.ones(1)\ndist.all_reduce(t)\nprint('SUM', t.item(), world_size)")
    session.export(tmp_path / "train.py")

    done = subprocess.run(
        [sys.executable, "train.py"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "SUM 1.0 1\n"), done.stderr


def test_a_difference_is_named_with_its_size(session, tmp_path):
    session.execute("a = torch.zeros(2) + rank\nb = 'x'\nc = [1, 2.0]")
    script = session.export(tmp_path / "train.py")
    session.execute("a[0] += 0.5 * rank\nb = 'y'\nc.append(3)\nd = 1")

    with pytest.raises(ExportError) as error:
        session.check_export(script, ["a", "b", "c", "d"])
    lines = str(error.value).splitlines()
    assert lines[0] == f"{script} gives other results than the session:"
    assert "  a, rank 1: a differs by up to 0.333." in lines
    assert "  b, ranks 0-1: b is 'y' in the session, 'x' in the script." in lines
    assert any(line.startswith("  c, ranks 0-1: ") for line in lines)
    assert "  d, ranks 0-1: only the session has it." in lines
    assert session.check_export(script, "a", tolerance=0.5)["a"] == pytest.approx(1 / 3)


def test_a_check_that_cannot_be_made_says_why(session, tmp_path):
    session.execute("f = lambda: 1\nx = 1")
    script = session.export(tmp_path / "train.py")

    with pytest.raises(ExportError, match="no rank of the session has nope"):
        session.check_export(script, ["x", "nope"])
    with pytest.raises(Exception, match="f is a function, which cannot be compared"):
        session.check_export(script, ["f"])
    with pytest.raises(ExportError, match="there is no script"):
        session.check_export(tmp_path / "other.py", ["x"])
    (tmp_path / "bad.py").write_text("x = 1\nif __name__ == '__main__':\n    1 / 0\n")
    with pytest.raises(ExportError, match=r"does not run through: ZeroDivisionError on ranks 0-1"):
        session.check_export(tmp_path / "bad.py", ["x"])
    assert not [name for name in os.listdir(os.environ["TMPDIR"]) if "check" in name]


def test_what_failed_is_not_written_and_a_restart_begins_anew(session, tmp_path):
    session.execute("x = 1")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        session.execute("y = 2\n1 / 0")
    text = session.export(tmp_path / "train.py").read_text()
    assert "x = 1" in text
    assert "y = 2" not in text

    session.restart([1])
    assert session.history.entries
    session.restart()
    with pytest.raises(ExportError, match="nothing has run"):
        session.export(tmp_path / "train.py")


def test_names_that_no_exported_cell_defines_are_told_with_the_cell_that_did(session, tmp_path):
    session.execute("a = 1", label="In[1]")
    with pytest.raises(RunError):
        session.execute("w = torch.ones(2)\nb = 1\nraise ValueError", label="In[2]")
    session.execute("def f(): return w + a\nc = [n for n in range(3)]\nf()", label="In[3]")
    session.diff("w")
    with pytest.warns(UserWarning, match=r"uses names that none of its cells defines") as caught:
        path = session.export(tmp_path / "script.py")
    said = [line.strip() for line in str(caught[0].message).splitlines()[1:]]
    assert said == [
        "w: In[2] has defined it, which failed, or was stopped: run it again, or export it."
    ]
    assert caught[0].filename == __file__
    assert "\nw\n" not in path.read_text()
    with pytest.warns(UserWarning, match=r"a: In\[1\] has defined it, which was not chosen"):
        session.export(tmp_path / "script.py", cells=[3])


def test_a_script_that_has_all_its_names_is_written_without_a_warning(session, tmp_path):
    session.execute("from math import *\nx = sqrt(2)", label="In[1]")
    session.execute("y = [rank, world_size, device, local_rank, dist, torch, len, __name__]")
    session.execute("class A:\n    z = 1\n    def f(self): return self.z + y[0]\nA().f()")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.export(tmp_path / "script.py")
        session.export(tmp_path / "script.py", cells=["session.execute", 1][1:])


def test_submitted_calls_are_written_as_others(session, tmp_path):
    session.submit(os.path.join, "a", "b").result(timeout=100)
    text = session.export(tmp_path / "train.py").read_text()

    assert "join('a', 'b')" in text


def test_a_notebook_writes_its_cells(tmp_path):
    notebook = Notebook()
    try:
        notebook.run(f"import sys, os; sys.path.insert(0, {ROOT!r}); os.chdir({str(tmp_path)!r})")
        assert notebook.run("%load_ext distsession\n%session start 2 --seed 0").error == ""
        notebook.run("%%distributed\n%time x = torch.rand(2)\n!true\nx")
        notebook.run(
            "class Net:\n    def forward(self):\n        return scale * rank\n"
            "scale = 3\n"
            "def train(steps):\n    global trained\n    trained = Net().forward() + steps"
        )
        assert notebook.run("from distsession import current_session\n"
                            "current_session().run(train, 2)").error == ""  # fmt: skip
        shown = notebook.run("%session export train.py --slurm --check x,trained", timeout=90)
        assert shown.error == ""
        assert shown.result == "wrote train.py and train.sbatch. It gives the same x, trained."
        notebook.run("%%distributed\n%pip --version")
        shown = notebook.run("%session export train.py")
        assert shown.ename == "ExportError"
        assert "In[7]: %pip --version is not translated." in shown.error
        assert notebook.run("%session export train.py --cells 3,train").error == ""
    finally:
        notebook.run("%session close")
        notebook.close()
    text = (tmp_path / "train.py").read_text()
    assert "# %% In[3]\nx = torch.rand(2)\nsubprocess.run('true', shell=True, check=False)" in text
    assert "def _call_2():\n    scale = 3\n" in text
    assert "%distributed" not in text


def test_other_hash_seeds_show_what_leans_on_the_order_of_a_set(
    session, tmp_path, monkeypatch, cold_agents
):
    session.execute(
        "import os\n"
        "order = list({f'layer.{n}' for n in range(40)})\n"
        "first = [order]\n"
        "dist.broadcast_object_list(first)\n"
        "alike = first[0] == order\n"
        "names = sorted(order)\n"
        "place = [os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK')]"
    )
    assert dict(session.evaluate("alike")) == {0: True, 1: True}
    script = session.export(tmp_path / "sets.py")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    found = session.check_export(script, ["names", "place"], hash_seeds=True)
    assert found == {"names": 0.0, "place": 0.0}
    with pytest.raises(ExportError, match="alike, rank 1: alike is True in the session, False in"):
        session.export(script, check="alike", hash_seeds=True)
    assert os.environ["PYTHONHASHSEED"] == "0"
