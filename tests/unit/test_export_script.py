"""The text of an exported script."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from distsession import ExportError, SessionOptions
from distsession.export.history import History
from distsession.export.script import parse_cells, script_text, write_script
from distsession.ranks import DeviceInfo

SOURCE = '''
import math
lr = 0.1
big = object()

def decorate(f):
    return f

class Base:
    def nothing(self):
        big = 1
        return big

class Net(Base):
    """A net.

    of some lines"""

    def forward(self, x: math):
        return x * lr

@decorate
def train(steps):
    global trained
    trained = Net().forward(steps) + rank
    return trained

def resets():
    global lr
    lr = 1

def doubles():
    global lr
    lr = lr * 2
'''


def fake(rank_info, **options):
    infos = [rank_info(rank, world_size=2) for rank in range(2)]
    return SimpleNamespace(
        history=History(),
        world_size=2,
        infos=infos,
        options=SessionOptions(ranks=2, **options),
    )


@pytest.fixture
def session(rank_info):
    return fake(rank_info)


def ran(session, *sources, ranks=(0, 1)):
    for source in sources:
        number = len(session.history.entries) + 1
        session.history.keep(session.history.cell(ranks, source, f"In[{number}]"))


def executed(text: str) -> dict:
    """Run a script's text alone, without its process group."""
    namespace = {"__name__": "__main__"}
    begin, end = text.index("_made_group ="), text.index("# %% ")
    text = text[:begin] + text[end : text.index("# %% the end")]
    exec(compile(text, "train.py", "exec"), namespace)
    return namespace


def test_cells_come_in_order_under_headings(session):
    ran(session, "a = 1", "# %%distributed --out b\nb = a + 1", "b * 2")
    text = script_text(session, "train.py")

    headings = [line for line in text.splitlines() if line.startswith("# %%")]
    assert headings == [
        "# %% In[1]",
        "# %% In[2] (%%distributed --out b)",
        "# %% In[3]",
        "# %% the end",
    ]
    assert text.startswith('"""Written by distsession from what ran on 2 ranks.')
    assert "torchrun --standalone --nproc-per-node=2 train.py" in text
    assert "distsession run --ranks 2 train.py" in text
    assert executed(text)["b"] == 2


def test_a_cell_of_some_ranks_stays_there(session):
    ran(session, "a = '''\nx'''\nb = 1", ranks=(0,))
    ran(session, "a = 2", "# nothing", ranks=(1,))
    text = script_text(session, "train.py")

    assert "if rank == 0:\n    a = '''\nx'''\n    b = 1\n" in text
    assert "if rank == 1:\n    # nothing\n    pass\n" in text
    assert executed(text)["a"] == "\nx"


def test_imports_are_collected_at_the_top(session):
    ran(session, "from __future__ import annotations\nx = 1", "!true", "%env A_B=3")
    text = script_text(session, "train.py")

    assert ast.get_docstring(ast.parse(text)) is not None
    lines = text.splitlines()
    assert lines.index("from __future__ import annotations") < lines.index("import subprocess")
    assert lines.count("import os") == 1
    compile(text, "train.py", "exec")


def test_everything_that_cannot_be_written_is_named(session):
    ran(session, "%pip install x", "x = 1", "await x")
    session.history.keep(session.history.call([0, 1], lambda: 1, [], {}))
    session.history.keep(session.history.other([0], "session.push(a=...)", "a is a Net"))

    with pytest.raises(ExportError) as error:
        script_text(session, "train.py")
    message = str(error.value)
    assert "In[1]: %pip install x is not translated." in message
    assert "In[3]: it awaits outside a function" in message
    assert "it cannot be written, since test_everything_that_cannot_be_written_is_named" in message
    assert "session.push(a=...): it cannot be written, since a is a Net." in message
    assert "In[2]" not in message


def test_chosen_cells_are_written_and_the_others_named(session):
    ran(session, "a = 1", "%pip install x", "a += 1")
    text = script_text(session, "train.py", [1, 3])

    assert executed(text)["a"] == 2
    assert "This ran, too, and was left out:\n\n- In[2]\n" in text
    with pytest.raises(ExportError, match=r"In\[7\], nope did not run .*In\[1\], In\[2\], In\[3\]"):
        script_text(session, "train.py", [7, "nope"])


def test_nothing_is_an_error(session):
    with pytest.raises(ExportError, match="nothing has run"):
        script_text(session, "train.py")


def test_what_was_forgotten_is_an_error(session):
    ran(session, "a = 1")
    session.history.forgotten = 3
    with pytest.raises(ExportError, match="the first 3 cells and calls are forgotten"):
        script_text(session, "train.py")
    assert executed(script_text(session, "train.py", [1]))["a"] == 1


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """A module that passes for a notebook, its source known."""
    import sys
    import types

    module = types.ModuleType("__main__")
    path = tmp_path / "notebook.py"
    path.write_text(SOURCE)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(SOURCE, str(path), "exec"), module.__dict__)
    return module


def test_calls_bring_what_they_use(session, notebook):
    ran(session, "lr = 100")
    for _ in range(2):
        session.history.keep(session.history.call([0, 1], notebook.train, [10], {}))
    text = script_text(session, "train.py")

    assert "# %% session.run(train)\ndef _call_2():" in text
    assert "for _ in range(2):\n    _call_2()" in text
    namespace = executed(text)
    assert namespace["trained"] == 1.0  # the notebook's lr
    assert namespace["lr"] == 100  # the ranks' own is as it was
    assert "Net" not in namespace


def test_calls_are_chosen_by_name(session, notebook):
    session.history.keep(session.history.call([0, 1], notebook.train, [10], {}))
    ran(session, "%pip install x")

    assert executed(script_text(session, "train.py", ["train"]))["trained"] == 1.0


def test_a_global_that_both_have_is_refused(session, notebook):
    session.history.keep(session.history.call([0, 1], notebook.resets, [], {}))
    assert executed(script_text(session, "train.py"))["lr"] == 1  # as on the ranks

    session.history.keep(session.history.call([0, 1], notebook.doubles, [], {}))
    with pytest.raises(ExportError, match="it stores the global lr, which the notebook has, too"):
        script_text(session, "train.py")


def test_a_function_without_source_is_refused(session, notebook):
    exec("def hidden(): pass", notebook.__dict__)
    session.history.keep(session.history.call([0, 1], notebook.hidden, [], {}))
    with pytest.raises(ExportError, match="the source of hidden is not known"):
        script_text(session, "train.py")


def test_options_of_the_session_are_in_the_head(rank_info):
    session = fake(rank_info, backend="gloo", timeout=30, seed=7, seed_per_rank=True, threads=1)
    ran(session, "x = float(torch.rand(()))")
    text = script_text(session, "train.py")

    assert 'device = torch.device("cpu")' in text
    assert "torch.set_num_threads(1)" in text
    assert "torch.manual_seed(7 + rank)" in text
    assert '"gloo", timeout=timedelta(seconds=30)' in text
    assert executed(text)["x"] == executed(text)["x"]


def test_a_gpu_is_chosen_as_a_session_does(rank_info, session):
    ran(session, "x = 1")

    assert "cuda.is_available()" in script_text(session, "train.py")


def test_another_accelerator_is_chosen_by_its_type(rank_info):
    session = fake(rank_info, backend="xccl", preload=("json",))
    device = DeviceInfo("xpu:1", "Max 1550")
    session.infos = [replace(info, device=device) for info in session.infos]
    ran(session, "x = 1")
    text = script_text(session, "train.py")

    assert 'device = torch.device("xpu", local_rank)' in text
    assert "torch.get_device_module(device).set_device(device)" in text
    assert "import json\n" in text
    compile(text, "train.py", "exec")


def test_a_batch_file_lies_beside(session, tmp_path):
    ran(session, "x = 1")
    script = write_script(session, tmp_path / "train.py", slurm=True)
    batch = tmp_path / "train.sbatch"

    assert script == tmp_path / "train.py"
    assert "--nproc-per-node=2" in batch.read_text()
    assert "gpus" not in batch.read_text()
    subprocess.run(["bash", "-n", str(batch)], check=True, timeout=20)


def test_only_what_an_export_wrote_is_written_over(session, tmp_path):
    ran(session, "x = 1")
    write_script(session, tmp_path / "train.py", slurm=True)
    write_script(session, tmp_path / "train.py", slurm=True)
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / "other.sbatch").write_text("#!/bin/bash\n")

    with pytest.raises(ExportError, match="was not written by an export"):
        write_script(session, tmp_path / "mine.py")
    with pytest.raises(ExportError, match=r"other\.sbatch is there already"):
        write_script(session, tmp_path / "other.py", slurm=True)
    assert not (tmp_path / "other.py").exists()
    with pytest.raises(ExportError, match=r"ends in \.py"):
        write_script(session, tmp_path / "train.txt")


@pytest.mark.parametrize(
    ("text", "cells"),
    [("3", [3]), ("3-5,8", [3, 4, 5, 8]), (" train , 1 ", ["train", 1]), ("", [])],
)
def test_cells_are_read_from_text(text, cells):
    assert parse_cells(text) == cells
