"""A torch that is too old is said at once; ranks would wait for its store until the limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distsession import LaunchError, Session
from tests.conftest import assert_nothing_left, traces


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
