"""Sessions on hosts by ssh, in network namespaces: cells, collectives, transfers, errors, Stop."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
import torch

from distsession import (
    CollectiveHangError,
    OptionsError,
    RunError,
    RunInterrupt,
    Session,
)
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, reduced, start
from tests.until import Press

NAMES = ("gpu1", "gpu2", "gpu3")
LARGE = 16 << 20
"""Elements of 64 MB."""


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(NAMES) as found:
        yield found
        nothing_left(found)
        assert not list(found.folder.glob("distsession-*"))


@pytest.fixture(scope="module")
def six(lab: HostLab) -> Iterator[Session]:
    """Two ranks on each of three hosts."""
    with start(lab, *NAMES, hang_grace=0.5) as session:
        yield session


@pytest.fixture(scope="module")
def local() -> Iterator[Session]:
    """As many on this one, to compare with."""
    with Session(6, hang_grace=0.5) as session:
        yield session


def stop() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# --- places ---------------------------------------------------------------------------------------


def test_each_host_has_its_ranks_in_the_order_that_was_given(lab: HostLab, six: Session) -> None:
    told = [(host.name, host.node, host.ranks, host.address) for host in six.hosts]
    assert told == [
        (name, node, (2 * node, 2 * node + 1), lab[name].address) for node, name in enumerate(NAMES)
    ]
    six.execute("import os, socket")
    places = "(socket.gethostname(), *(int(os.environ[n]) for n in ('NODE_RANK', 'LOCAL_RANK')))"
    assert list(six.evaluate(places).values()) == [
        (name, node, local) for node, name in enumerate(NAMES) for local in (0, 1)
    ]


def test_the_ranks_of_a_host_are_called_by_its_name(six: Session) -> None:
    assert dict(six.on("gpu2").evaluate("rank")) == {2: 2, 3: 3}
    assert dict(six.on("gpu1", "gpu3").run(lambda: os.uname().nodename)) == {
        0: "gpu1", 1: "gpu1", 4: "gpu3", 5: "gpu3",
    }  # fmt: skip
    with pytest.raises(OptionsError, match=r"no host .gpu9.: .* gpu2 \(ranks 2-3\)"):
        six.on("gpu9")


def test_the_output_of_each_rank_comes_here_in_its_order(
    six: Session, capfd: pytest.CaptureFixture[str]
) -> None:
    six.execute("for i in range(200):\n    print(rank, i)")
    lines = capfd.readouterr().out.splitlines()
    for rank in range(6):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank} {i}" for i in range(200)]


# --- modules --------------------------------------------------------------------------------------


def test_a_module_is_preloaded_on_all_hosts_or_on_none(six: Session) -> None:
    six.execute("import sys")
    is_there = "'wsgiref.handlers' in sys.modules"
    assert set(six.evaluate(is_there).values()) == {False}
    with pytest.raises(OptionsError, match=r"on gpu\d, the preload module 'no_such_module' does"):
        six.preload("wsgiref.handlers", "no_such_module")
    six.restart()
    six.execute("import sys")
    assert set(six.evaluate(is_there).values()) == {False}
    six.preload("wsgiref.handlers")
    six.restart()
    six.execute("import sys")
    assert set(six.evaluate(is_there).values()) == {True}
    assert reduced(six) == {6.0}


# --- collectives ----------------------------------------------------------------------------------


def test_collectives_cross_the_hosts(six: Session) -> None:
    assert reduced(six) == {6.0}
    six.execute(
        "pair = dist.new_group([1, 2])\n"
        "t = torch.full((1000,), float(rank))\n"
        "if rank in (1, 2):\n    dist.all_reduce(t, group=pair)"
    )
    assert six.evaluate("float(t[0])")[1] == six.evaluate("float(t[0])")[2] == 3.0
    assert six.evaluate("float(t[0])")[5] == 5.0


def test_a_model_is_trained_on_all_hosts(six: Session) -> None:
    six.execute(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "torch.manual_seed(0)\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.full((2, 4), float(rank))).sum().backward()\n"
        "optimizer.step()\n"
        "weights = model.module.weight.detach().clone()\n"
        "gradient = model.module.weight.grad.clone()"
    )
    weights, gradients = six.pull("weights"), six.pull("gradient")
    assert all(torch.equal(weights[0], each) for each in weights.values())
    assert torch.allclose(gradients[5], torch.full((1, 4), 2 * 2.5))


def test_tensors_go_to_all_hosts_and_back(six: Session) -> None:
    x = torch.randn(LARGE)
    six.push(x=x)
    back = six.on("gpu1", "gpu3").pull("x")
    assert back.ranks == (0, 1, 4, 5)
    assert all(torch.equal(each, x) for each in back.values())
    six.scatter("part", x[: 6 * 1000])
    assert torch.equal(six.gather("part"), x[: 6 * 1000])
    six.execute("x = part = None")


# --- errors ---------------------------------------------------------------------------------------

WRONG = {
    "error": "1 / (rank - 3)",
    "error while others wait": "dist.barrier() if rank != 3 else 1 / 0",
    "deadlock": "if rank == 3:\n    dist.barrier()",
    "deadlock of a host": "if rank in (2, 3):\n    dist.all_reduce(torch.ones(3))",
    "mismatch": "dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if rank > 3 else "
    "dist.ReduceOp.SUM)",
    "other operation": "dist.all_reduce(torch.ones(3)) if rank < 4 else dist.barrier()",
}


def first_line(session: Session, code: str) -> tuple[type[BaseException], str]:
    with pytest.raises((RunError, CollectiveHangError)) as caught:
        session.execute(code)
    return type(caught.value), str(caught.value).splitlines()[0]


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
def test_the_first_line_of_an_error_is_as_on_one_host(
    six: Session, local: Session, code: str
) -> None:
    found, expected = (first_line(each, code) for each in (six, local))
    assert _without_numbers(found[1]) == _without_numbers(expected[1])
    assert found[0] is expected[0]
    if "1 / " in code:
        assert "on rank 3 (gpu2) at " in found[1]
    assert reduced(six) == {6.0}


def _without_numbers(text: str) -> str:
    """Without those of cells and of operations, which count what was run before, and hosts."""
    return re.sub(r"In\[\d+\]|#\d+ | \(gpu\d\)", "", text)


def test_stop_ends_a_collective_that_waits_and_a_sleep_on_other_hosts(six: Session) -> None:
    six.execute("kept = torch.full((3,), float(rank))\nimport time")
    for code in (
        "dist.barrier() if rank != 4 else time.sleep(600)",
        "time.sleep(600)",
    ):
        with Press(six, stop), pytest.raises(RunInterrupt):
            six.execute(code)
        assert reduced(six) == {6.0}
    assert [float(each[0]) for each in six.pull("kept").values()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
