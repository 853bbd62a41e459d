"""A torch that has changed what is not public: the start says what is off, and the rest works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distsession import RunError, RunInterrupt, Session
from distsession.engine.collectives import torch_changes
from tests.until import Press

NEWER = "import torch\ntorch.__version__ = '2.99.0'\n"
WITHOUT = "from torch.distributed import distributed_c10d as c10d\ndel c10d._hash_ranks_to_str\n"
REFUSES = """
import functools
from torch.distributed import distributed_c10d as c10d

native = c10d._new_process_group_helper

@functools.wraps(native)
def helper(*args, **kwargs):  # as torch 2.15 did, for a hook of its own
    made = native(*args, **kwargs)
    if "distsession" in [str(each) for each in (*args, *kwargs.values())]:
        raise RuntimeError("Could not find the default backend type 0")
    return made

c10d._new_process_group_helper = helper
"""
OTHERS = (
    "import torch.distributed.rendezvous as _\nfrom torch.nn.parallel import "
    "DistributedDataParallel\nfrom torch._C._dynamo import eval_frame\nimport sys\n"
    "del sys.modules['torch.distributed.rendezvous']._torchelastic_use_agent_store\n"
    "del DistributedDataParallel._ddp_init_helper\ndel eval_frame.set_code_exec_strategy\n"
)
GROUPS_OFF = (
    "process groups and modules have to be made again"
    if torch_changes.has_hooks()
    else "what ranks call is neither seen nor compared"
)


@pytest.fixture
def start_with(
    start: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Session]:
    """Start two ranks whose torch has been changed by this code."""

    def start_it(code: str) -> Session:
        (tmp_path / "sitecustomize.py").write_text(code)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)  # and agents import torch anew for it
        return start(2)

    return start_it


def stop(session: Session, code: str) -> None:
    """Press Stop once ranks are in the midst of this."""
    with (
        Press(session, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(RunInterrupt),
    ):
        session.execute(code)


def check(session: Session) -> None:
    session.execute("t = torch.ones(1) * rank\ndist.all_reduce(t)")
    assert dict(session.evaluate("t.item()")) == {0: 1.0, 1: 1.0}


HANG = "dist.barrier() if rank == 0 else __import__('time').sleep(600)"


@pytest.mark.parametrize(
    ("code", "name"),
    [(NEWER + WITHOUT, "_hash_ranks_to_str"), (NEWER + REFUSES, "way to make a process group")],
    ids=["a name is gone", "our groups are refused"],
)
def test_without_our_groups_torchs_own_are_used(
    start_with: Callable[[str], Session], code: str, name: str
) -> None:
    said = rf"torch 2\.99\.0 is newer than .* its {name} has changed: {GROUPS_OFF}"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        session = start_with(code)
    assert len(warned) == 1
    check(session)
    session.execute("kept = rank + 7")
    stop(session, HANG)
    check(session)
    with pytest.raises(RunError, match="division by zero"):
        session.execute("1 / rank")
    assert dict(session.evaluate("kept")) == {0: 7, 1: 8}
    session.restart([1])
    check(session)
    session.execute(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "(model(torch.ones(1, 1)) * (rank + 1)).sum().backward()"
    )
    assert set(session.evaluate("model.module.weight.grad.item()").values()) == {1.5}


def test_each_part_that_is_gone_is_named_and_the_rest_works(
    start_with: Callable[[str], Session],
) -> None:
    with pytest.warns(RuntimeWarning) as warned:
        session = start_with(OTHERS)
    assert [str(each.message).partition("its ")[2] for each in warned] == [
        "_torchelastic_use_agent_store has changed: process groups that code makes by itself meet "
        "as under torchrun, without Stop.",
        "set_code_exec_strategy has changed: torch.compile may fail in code that calls collectives "
        "or prints.",
        "_ddp_init_helper has changed: a DistributedDataParallel has to be made again after a "
        "Stop.",
    ]
    check(session)
    stop(session, HANG)
    check(session)
