"""One rank in this very process."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from distsession import (
    LaunchError,
    OptionsError,
    RunError,
    SerializationError,
    Session,
    SessionStateError,
)


@pytest.fixture
def inline():
    with Session(launcher="inline") as session:
        yield session
    assert not dist.is_initialized()


def test_functions_and_cells_run_in_this_process(inline: Session, capsys) -> None:
    assert inline.world_size == 1
    assert inline.run(os.getpid)[0] == os.getpid()
    inline.execute("x = rank + 41\nprint('printed')")
    assert inline.evaluate("x + world_size")[0] == 42
    assert capsys.readouterr().out == "printed\n"


def test_collectives_work(inline: Session) -> None:
    inline.execute("t = torch.ones(2)\ndist.all_reduce(t)")
    assert inline.evaluate("t.sum().item()")[0] == 2.0


def test_errors_are_those_of_a_rank(inline: Session) -> None:
    with pytest.raises(RunError, match="ZeroDivisionError on rank 0") as caught:
        inline.execute("1 / 0")
    assert isinstance(caught.value.first, ZeroDivisionError)
    with pytest.raises(SerializationError):
        inline.run(lambda lock: lock, threading.Lock())


def test_what_only_processes_of_their_own_have_is_said(inline: Session) -> None:
    with pytest.raises(SessionStateError, match="launcher='local'"):
        inline.client  # noqa: B018
    with pytest.raises(OptionsError, match="inline"):
        Session(launcher="inline", backend="nccl")
    with pytest.raises(SessionStateError, match="process group already"):
        Session(launcher="inline")
    assert inline.evaluate("rank")[0] == 0
    with pytest.raises(OptionsError, match=r"timeout=0\.5 is not possible in an inline session"):
        inline.execute("x = 1", timeout=0.5)
    with pytest.raises(RunError, match="NameError"):
        inline.evaluate("x")


def test_options_are_those_of_a_rank(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "early_bird.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = torch.get_num_threads()
    options = {"threads": before + 1, "preload": ["early_bird"], "timeout": 7, "backend": "GLOO"}
    with Session(launcher="inline", **options) as session:
        assert "early_bird" in sys.modules
        assert session.evaluate("torch.get_num_threads()")[0] == before + 1
        assert session.infos[0].device.threads == before + 1
        gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert gloo.options._timeout.total_seconds() == 7
    assert torch.get_num_threads() == before


def test_a_preload_that_does_not_import_leaves_nothing() -> None:
    with pytest.raises(LaunchError, match=r"'no_such_module' does not import: ModuleNotFound"):
        Session(launcher="inline", preload=["no_such_module"])
    assert not dist.is_initialized()


def test_restart_is_a_fresh_namespace(inline: Session) -> None:
    inline.execute("x = 1")
    inline.restart()
    with pytest.raises(RunError, match="NameError"):
        inline.evaluate("x")


def test_a_group_that_the_user_has_left_is_no_reason_to_fail() -> None:
    with Session(launcher="inline") as session:
        session.execute("dist.destroy_process_group()")
        session.restart()
        session.execute("dist.barrier(); dist.destroy_process_group()")


def test_there_is_nothing_to_reconnect_and_a_restart_brings_the_group_back(inline: Session) -> None:
    inline.execute("import torch.distributed as dist; dist.destroy_process_group()")
    with pytest.raises(SessionStateError, match=r"nobody to connect to: session.restart\(\)"):
        inline.reconnect()
    inline.restart()
    inline.execute("import torch.distributed as dist")
    assert inline.evaluate("dist.is_initialized()")[0] is True
