"""The notebooks and the demo run through, as their readers would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.pages import ROOT, blocks, is_as_shown

from .kernel import execute_notebook
from .terminal import spawn_ipython

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TIMEOUT = 300

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.timeout(TIMEOUT),
    pytest.mark.usefixtures("cold_agents"),
]


@pytest.fixture
def this_python(tmp_path, monkeypatch):
    """Let the kernel ``python3`` be the interpreter that runs the tests, whatever else is there."""
    from ipykernel.kernelspec import write_kernel_spec

    write_kernel_spec(str(tmp_path / "kernels" / "python3"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))


def execute(path):
    """Run a notebook; cells tagged ``raises-exception`` may fail, no others.

    Those tagged ``skip-execution`` need somebody who answers.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    execute_notebook(notebook, timeout=TIMEOUT, resources=resources)
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and "skip-execution" not in cell.metadata.get("tags", [])
    ]


def outputs(cell, kind):
    return [output for output in cell.outputs if output.output_type == kind]


def test_there_are_notebooks():
    assert NOTEBOOKS


def check_what_is_hosted(cells):
    """Bars, errors, a Stop and a script, in a notebook that somebody else's machine may run."""
    errors = [error for cell in cells for error in outputs(cell, "error")]
    assert [error.ename for error in errors] == ["RunError", "RunInterrupt"]
    assert "RuntimeError on ranks 0-1" in plain(errors[0])
    assert "for rank 1, which runs In[" in plain(errors[1])
    shown = [str(output.get("data", "")) for cell in cells for output in cell.outputs]
    assert any("[rank 1] training: 100%" in text for text in shown)
    assert any("It gives the same losses" in text for text in shown)


def check_what_is_seen(cells):
    """What the ranks do can be read without a browser."""
    texts = [
        "\n".join(
            output.get("text") or output["data"]["text/plain"]
            for output in cell.outputs
            if output.output_type in ("stream", "display_data", "execute_result")
        )
        for cell in cells
    ]
    [panel] = [text for cell, text in zip(cells, texts, strict=True) if cell.source == "session"]
    assert re.search(r"^backend +gloo", panel, re.MULTILINE)
    assert re.search(r"^3 .* idle", panel, re.MULTILINE)
    [training] = [text for text in texts if "all ranks have trained" in text]
    assert "[ranks 0-3]" in training
    assert training.count("40/40") == 4
    assert any("19,800 lines are left out here; all of them: /" in text for text in texts)
    waits = [text for text in texts if text.startswith("The others waited for rank 2: ")]
    assert len(waits) == 2  # of the cell, and of its timeline
    lines = "\n".join(texts).splitlines()  # the first comparison also says how long it took
    assert any(line.startswith("model is equal on ranks 0-3") for line in lines)
    assert any(line.startswith("x: ranks 1-3 differ") for line in lines)


def check_what_is_kept(cells):
    """The kernel of the notebook goes on with what a process that was killed had begun."""
    texts = [
        "".join(str(out.get("text") or out["data"]["text/plain"]) for out in cell.outputs)
        for cell in cells
    ]
    [said] = [text for text in texts if "is still there" in text]
    assert re.search(r"session yesterday \(2 ranks, gloo\) .* %session attach yesterday", said)
    [attached] = [text for text in texts if "trained on after its kernel had ended" in text]
    assert re.search(r"^In\[3\], begun \d\d:\d\d:\d\d$", attached, re.MULTILINE)
    assert attached.count("step 0: loss") == attached.count("step 50: loss") == 2
    assert attached.count("/100000 [") == 2
    assert any("nobody since" in text for text in texts)


def check_what_two_hosts_do(cells):
    """A host is lost while both train, and another one trains on in its place."""
    [error] = [error for cell in cells for error in outputs(cell, "error")]
    assert re.match(r"EngineDiedError: ranks? 2.*the agent on gpu2 ", plain(error))
    texts = [
        "".join(str(out.get("text") or out["data"]["text/plain"]) for out in cell.outputs)
        for cell in cells
        if not outputs(cell, "error")
    ]
    assert any("node 1, gpu2: ranks (2, 3)" in text for text in texts)
    assert any("ranks 2-3 are dead (on gpu2; 4 ranks, gloo)" in text for text in texts)
    assert any("equal weights on all ranks of gpu1 and gpu3" in text for text in texts)


def plain(error: Any) -> str:
    """What a cell shows of its error, without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_through(path, this_python):
    cells = execute(path)

    assert all(cell.execution_count for cell in cells)
    for cell in cells:
        may_fail = "raises-exception" in cell.metadata.get("tags", [])
        assert bool(outputs(cell, "error")) == may_fail, cell.source
    if path.stem == "00_hosted":
        check_what_is_hosted(cells)
    if path.stem == "01_first_session":
        [failing] = [cell for cell in cells if outputs(cell, "error")]
        [error] = outputs(failing, "error")
        assert error.ename == "RunError"
        assert "ranks 1,3" in error.evalue
        assert "ranks 1,3" in plain(error)
        assert re.search(r"----> +3 torch\.ones", plain(error))
    if path.stem == "04_from_notebook_to_job":
        [error] = [error for cell in cells for error in outputs(cell, "error")]
        assert error.ename == "ExportError"
        assert "In[4]: %pip --version is not translated" in error.traceback[0]
    if path.stem == "05_see_the_ranks":
        check_what_is_seen(cells)
    if path.stem == "06_keep":
        check_what_is_kept(cells)
    if path.stem == "07_several_hosts":
        check_what_two_hosts_do(cells)
    if path.stem == "02_when_a_rank_fails":
        errors = [error for cell in cells for error in outputs(cell, "error")]
        assert [error.ename for error in errors] == [
            "RunInterrupt",
            "RunError",
            "CollectiveHangError",
            "RunError",
            "CollectiveMismatchError",
            "RunError",
            "RunError",
        ]
        texts = [plain(error) for error in errors]
        assert all("rank 1" in text for text in (*texts[:4], *texts[5:]))
        assert "for rank 1, which runs In[" in texts[0]
        assert texts[1].startswith("ValueError on rank 1")
        assert texts[3].startswith("CollectiveMismatchError: rank 1 called")
        assert "was killed by SIGKILL" in texts[5]
        assert "dist.new_group([0, 1, 2, 3])" in texts[6]


def test_the_same_notebook_runs_in_a_terminal(tmp_path, this_python):
    child = spawn_ipython(timeout=TIMEOUT - 20, dimensions=(50, 300), cwd=str(tmp_path))
    child.expect_exact("In [1]: ")
    notebook = nbformat.read(FOLDER / "05_see_the_ranks.ipynb", as_version=4)
    for cell in notebook.cells:
        if "skip-execution" in cell.metadata.get("tags", []):
            cell.source = ""
    nbformat.write(notebook, tmp_path / "it.ipynb")
    child.sendline(
        "import nbformat; _ = [get_ipython().run_cell(cell.source, store_history=True) for cell in "
        "nbformat.read('it.ipynb', 4).cells if cell.cell_type == 'code']; print('all is' + ' run')"
    )
    child.expect_exact("all is run")
    written = str(child.before).replace("\r\n", "\n")
    child.sendline("exit()")
    child.expect(pexpect.EOF)
    assert "Traceback" not in written
    assert "session 1: idle (4 ranks, gloo)" in written
    for rank in range(4):
        assert f"[{rank}] all ranks have trained" in written
    assert "The others waited for rank 2: " in written
    assert "model is equal on ranks 0-3" in written
    assert "<div" not in written


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = nbformat.read(path, as_version=4).cells

    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_demo_trains_and_says_so():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "demo.py")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT - 20,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    [accuracy] = re.findall(r"^held-out accuracy (\d+\.\d)%$", done.stdout, re.MULTILINE)
    assert float(accuracy) >= 95
    assert "weights equal on all ranks" in done.stdout
    assert len(re.findall(r"^\[0\] epoch +\d+  loss \d", done.stdout, re.MULTILINE)) == 10
    [example] = [b.text for b in blocks((ROOT / "README.md").read_text()) if "epoch" in b.text]
    assert is_as_shown(_trained(example), _trained(done.stdout))


def _trained(text: str) -> str:
    """Without what differs from one processor to another: sums, times, names."""
    text = re.sub(r"(loss) [\d.]+", r"\1 N", text)
    text = re.sub(r"[\d.]+ (to start|to train|in all)", r"N \1", text)
    text = re.sub(r"\([0-9a-f]{16}\)", "(SUM)", text)
    return re.sub(r"^(\d) +\S+ +cpu .*", r"\1 cpu", text, flags=re.MULTILINE)
