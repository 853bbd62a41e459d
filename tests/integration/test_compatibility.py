"""What has to work with every version of Python, torch and Jupyter; ``make matrix`` tries many.

One test for each feature, in a kernel, as a user meets it. ``.ci/matrix.py`` makes a column of
``docs/compatibility.md`` from each test's name, so each needs only the session of ``test_start``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm_agents import STARTED

from .kernel import Notebook, Shown
from .test_panel import HANG, FrontEnd

SLOW_S = 120.0
"""What a cell may take on a machine that does much else."""


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STARTED, "1")  # agents import torch, as users' do
        front = FrontEnd()
    try:
        yield front
    finally:
        front.notebook.close()


@pytest.fixture
def notebook(front: FrontEnd) -> Notebook:
    return front.notebook


def run(notebook: Notebook, cell: str, wrote: str = "") -> Shown:
    """Run a cell that raises nothing and writes nothing beside what is displayed."""
    shown = notebook.run(cell, SLOW_S)
    assert shown.error == "", shown.error
    assert re.fullmatch(wrote, shown.stdout + shown.text["stderr"]), shown.text
    return shown


def test_start(notebook: Notebook) -> None:
    assert run(notebook, "%load_ext distsession").data == []
    started = "started ranks 0-1 on .*; backend gloo\n"
    assert "2 ranks, gloo" in run(notebook, "%session start 2 --backend gloo", started).result


def test_cells(notebook: Notebook) -> None:
    shown = run(
        notebook,
        "%%distributed\nprint('said')\nt = torch.ones(3) * rank\ndist.all_reduce(t)\nt.tolist()",
    )
    assert shown.plain == "[ranks 0-1] said\n[ranks 0-1] [1.0, 1.0, 1.0]", shown
    shown = run(notebook, "%%distributed\nimport math\nmath.pi * rank")
    assert shown.result == "[rank 0] 0.0\n[rank 1] 3.141592653589793"
    notebook.run("import torch", SLOW_S)  # which warns where there is no numpy
    assert "equal" in run(notebook, "%distributed --diff t").result
    assert "differ" in run(notebook, "%distributed --diff t + rank").result


def test_error(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\nif rank == 1:\n    1 / 0\ndist.barrier()", SLOW_S)
    assert shown.ename == "RunError"
    assert re.match(r"ZeroDivisionError on rank 1 .*at In\[\d+\] line 3:", shown.error), shown.error
    assert "    1 / 0" in shown.error


def test_stop(notebook: Notebook) -> None:
    run(notebook, "%%distributed\nkept = rank + 7")
    request = notebook.client.execute(HANG)
    shown = notebook.collect(request, SLOW_S, stop_at=["[rank 0] in barrier #", "[rank 1] running"])
    assert shown.ename == "RunInterrupt"
    assert "rank 0 waits in barrier" in shown.error
    assert run(notebook, "%distributed kept").result == "[rank 0] 7\n[rank 1] 8"
    run(notebook, "%%distributed\ndist.barrier()")


def test_mismatch(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\nx = torch.ones(4 + rank)\ndist.all_reduce(x)", SLOW_S)
    assert shown.ename == "RunError"
    assert re.match(r"CollectiveMismatchError: .*\[4\].*\[5\], at In", shown.error), shown.error
    shown = notebook.run(
        "%%distributed\nout = torch.ones(2 + rank)\n"
        "dist.reduce_scatter_tensor(out, torch.ones(2 * len(out)))",
        SLOW_S,
    )
    # Some releases call it through a decorator of another package, which is not the user's line.
    assert re.match(r"CollectiveMismatchError: .*at In\[\d+\] line 3\b", shown.error), shown.error


def test_panel(front: FrontEnd) -> None:
    front.run("from distsession import current_session\ncurrent_session().show_config()")
    assert front.errors == []
    front.wait(lambda: "MiB" in front.values(), SLOW_S)
    request = front.start(HANG)
    front.wait(lambda: "waiting in barrier" in front.values(), SLOW_S)
    assert request not in front.idle
    if front.subshell is None:  # no click is taken while a cell runs
        front.notebook.manager.interrupt_kernel()
    else:
        front.press("Stop")
    front.wait(lambda: request in front.idle, SLOW_S)
    front.wait(lambda: "waiting" not in front.values(), SLOW_S)


def test_px(notebook: Notebook) -> None:
    run(notebook, "%%distributed\nshared = rank + 1")
    shown = str(run(notebook, "%%px\nprint('px', shared)"))
    assert "px 1" in shown
    assert "px 2" in shown


def test_ddp(notebook: Notebook) -> None:
    shown = run(
        notebook,
        "%%distributed\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "for _ in range(3):\n"
        "    model.zero_grad()\n"
        "    (model(torch.ones(2, 4)).sum() * (rank + 1)).backward()\n"
        "model.module.weight.grad.tolist()",
    )
    assert shown.result == "[ranks 0-1] [[3.0, 3.0, 3.0, 3.0]]"


def test_fsdp2(notebook: Notebook) -> None:
    shown = run(
        notebook,
        "%%distributed\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "sharded = torch.nn.Linear(4, 2)\n"
        "fully_shard(sharded, mesh=init_device_mesh('cpu', (world_size,)))\n"
        "(sharded(torch.ones(2, 4)).sum() * (rank + 1)).backward()\n"
        "averages = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 9)\n"
        "(sharded.weight.grad.full_tensor() / (1 if averages else 2)).tolist()",
        wrote=r"(\[\d\] .*(FSDP2 adds up gradients on gloo in torch 2\.8|warn).*\n)*",
    )
    assert shown.result == "[ranks 0-1] [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]"


def test_export(notebook: Notebook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    run(notebook, "%%distributed\ntorch.manual_seed(rank)\nchecked = torch.rand(2)")
    run(notebook, "%%distributed\ndist.all_reduce(checked)")
    shown = run(notebook, f"%session export {script} --check checked")
    assert shown.result == f"wrote {script}. It gives the same checked."
