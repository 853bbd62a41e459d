"""A torch that is too old is said at once; ranks would wait for its store until the limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distsession import LaunchError, Session
from tests.conftest import assert_nothing_left, traces

from .conftest import Recorder


def test_a_start_with_a_torch_that_is_too_old_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the agent's Python runs this: another torch is not to be had within a test.
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.7.1+cpu'\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    before = traces()
    with pytest.raises(LaunchError, match=r"torch 2\.7\.1\+cpu is too old.* -m pip install") as e:
        Session(2)
    assert "start_timeout" not in str(e.value)
    assert_nothing_left(before)


def test_gradients_that_fsdp2_does_not_average_are_warned_of(
    start: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.8.0'\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    output = Recorder()
    session = start(2, output=output)
    session.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "out = torch.ones(1)\n"
        "dist.reduce_scatter_tensor(out, torch.ones(2))\n"
        "model = torch.nn.Linear(4, 2)\n"
        "fully_shard(model, mesh=init_device_mesh('cpu', (2,)))\n"
        "print('begins')\n"
        "for _ in range(2):\n    model(torch.ones(2, 4)).sum().backward()"
    )
    for rank in (0, 1):
        text = output.text(rank, "stderr")
        assert text.count("FSDP2 adds up gradients on gloo in torch 2.8.0, where") == 1
