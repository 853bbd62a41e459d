"""Sessions with each of the classes that torch has for NCCL, as the stand-in plays them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distsession import CollectiveHangError, RunError, RunInterrupt, Session
from tests.backends import STANDIN, STANDIN2, STANDIN_LAZY, Backend
from tests.until import LIMIT_S, Press

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.whole_on_each_backend,
    pytest.mark.skipif(STANDIN.why_not() is not None, reason=STANDIN.why_not() or ""),
]

CLASSES = {
    STANDIN: "ProcessGroupStandin",
    STANDIN2: "ProcessGroupStandin2",
    STANDIN_LAZY: "ProcessGroupStandinLazy",
}
each = pytest.mark.parametrize("kind", CLASSES, ids=str)
DEVICES = [5, 2]
"""Not the first ones, and not in their order."""
WHERE = """
def where():
    t = torch.ones(3)
    dist.all_reduce(t)
    if rank == 0:
        dist.send(t, 1)
    else:
        dist.recv(t, 0)
    bound = dist.group.WORLD.bound_device_id
    return [str(device), str(t.device), t[0].item(), str(bound)]
found = where()
"""


@each
def test_the_class_is_named(start: Callable[..., Session], kind: Backend) -> None:
    name = f"cpu:gloo,standin:{kind.name}"
    session = start(2, **kind.options(2) | {"backend": name}, threads=1)
    text = f"{name} ({CLASSES[kind]})"
    for info in session.infos:
        assert (info.backend, info.backend_class) == (name, CLASSES[kind])
        assert (info.backend_text, info.nccl) == (text, "")
    assert text in str(session.show_config())
    session.restart([1])
    assert session.infos[1].backend_text == text


def test_gloo_has_no_class_to_name(start: Callable[..., Session]) -> None:
    session = start(2, backend="gloo", threads=1)
    assert {(info.backend_text, info.backend_class) for info in session.infos} == {("gloo", "")}


@each
def test_ranks_are_on_the_devices_that_are_named(
    start: Callable[..., Session], kind: Backend
) -> None:
    session = start(2, **kind.options(2), threads=1, devices=DEVICES)
    names = [f"standin:{number}" for number in DEVICES]
    assert [info.device.device for info in session.infos] == names
    assert all(name in str(session.devices()) for name in names)
    session.execute(WHERE, timeout=LIMIT_S)
    # The older class has no device of its own where code names none.
    bound = ["None"] * 2 if kind == STANDIN else names
    right = {rank: [names[rank], names[rank], 2.0, bound[rank]] for rank in (0, 1)}
    assert dict(session.evaluate("found")) == right
    session.restart([1])
    session.execute(WHERE, timeout=LIMIT_S)
    assert dict(session.evaluate("found")) == right


@each
def test_what_a_rank_sees_of_gpus_moves_no_device(
    start: Callable[..., Session], kind: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a scheduler that shows a job some of the devices, which have other numbers then."""
    monkeypatch.setenv("DISTSESSION_STANDIN_DEVICES", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7,4")
    session = start(2, **kind.options(2), threads=1, devices=[2, 1])
    session.execute(WHERE, timeout=LIMIT_S)
    assert {rank: row[1] for rank, row in session.evaluate("found").items()} == {
        0: "standin:2",
        1: "standin:1",
    }
    told = session.evaluate("__import__('os').environ['CUDA_VISIBLE_DEVICES']")
    assert set(told.values()) == {"6,7,4"}


@pytest.mark.parametrize("kind", [STANDIN2, STANDIN_LAZY], ids=str)
def test_ranks_that_see_one_device_each_are_bound_to_it(
    start: Callable[..., Session], kind: Backend
) -> None:
    """As with slices of a GPU: all are ``:0``, and LOCAL_RANK says another number."""
    session = start(3, **kind.options(3), threads=1, devices=[0, 0, 0])
    session.execute("total = torch.ones(2)\ndist.all_reduce(total)", timeout=LIMIT_S)
    bound = "str(dist.group.WORLD.bound_device_id)"
    assert set(session.evaluate(bound).values()) == {"standin:0"}
    assert set(session.evaluate("total[0].item()").values()) == {3.0}


@each
def test_stop_frees_each_class(start: Callable[..., Session], kind: Backend) -> None:
    session = start(2, **kind.options(2), threads=1)
    code = "t = torch.ones(3)\nif rank == 0:\n    dist.all_reduce(t)\n    t.cpu()\nelse:\n"
    session.execute("import time\nkept = rank", timeout=LIMIT_S)
    with Press(session, session.interrupt), pytest.raises(RunInterrupt):
        session.execute(code + "    time.sleep(60)")
    session.execute("t = torch.ones(3)\ndist.all_reduce(t)\nfound = t[0].item()", timeout=LIMIT_S)
    assert dict(session.evaluate("(kept, found)")) == {0: (0, 2.0), 1: (1, 2.0)}


def test_stop_in_a_message_of_the_lazy_class_names_the_rank_to_replace(
    start: Callable[..., Session],
) -> None:
    """Its abort waits for the device, which waits for what is aborted after it."""
    session = start(2, **STANDIN_LAZY.options(2), threads=1)
    connect = "t = torch.ones(3)\ndist.send(t, 1) if rank == 0 else dist.recv(t, 0)\nkept = rank"
    session.execute(f"import time\n{connect}", timeout=LIMIT_S)
    code = "if rank == 1:\n    dist.recv(t, 0)\n    t.cpu()\nelse:\n    time.sleep(60)"
    with (
        Press(session, session.interrupt),
        pytest.raises(RunInterrupt, match=r"rank 1 waits for its device in recv.*restart\(\[1\]\)"),
    ):
        session.execute(code)
    session.restart([1])
    assert dict(session[[0]].evaluate("kept")) == {0: 0}
    session.execute(f"import time\n{connect}", timeout=LIMIT_S)
    assert dict(session.evaluate("kept")) == {0: 0, 1: 1}


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "not connected"])
def test_a_message_of_the_lazy_class_that_nobody_takes_ends_the_run(
    start: Callable[..., Session], is_connected: bool
) -> None:
    """Who waits for it cannot be freed, but the run ends, and says who is to be replaced."""
    session = start(3, **STANDIN_LAZY.options(3), threads=1, hang_grace=0.5)
    receive = "t = torch.ones(3)\nif rank == 0:\n    dist.recv(t, 2)\n    t.cpu()\n"
    connect = f"{receive}if rank == 2: dist.send(t, 0)"
    session.execute(f"kept = rank\n{connect if is_connected else ''}", timeout=LIMIT_S)
    stuck = r"Rank 0 (waited in recv #\d \(float32, 3 .*and )?could not be freed.*restart\(\[0\]\)"
    with pytest.raises(RunError, match=f"ValueError on rank 2 .*boom.*{stuck}") as failed:
        session.execute(f"{receive}if rank == 2: raise ValueError('boom')", timeout=LIMIT_S)
    assert sorted(failed.value.by_rank) == [0, 2]
    session.restart([0])
    if is_connected:
        session.execute(connect, timeout=LIMIT_S)
    with pytest.raises(CollectiveHangError, match=f"(?s)No wait can help.*{stuck}"):
        session.execute(receive, timeout=LIMIT_S)
    session.restart([0])
    session.execute(f"{connect}\ntotal = torch.ones(1)\ndist.all_reduce(total)", timeout=LIMIT_S)
    assert set(session.evaluate("total.item()").values()) == {3.0}
    assert dict(session[[1, 2]].evaluate("kept")) == {1: 1, 2: 2}


@each
def test_stop_frees_ranks_in_a_batch_of_messages(
    start: Callable[..., Session], kind: Backend
) -> None:
    session = start(2, **kind.options(2), threads=1)
    batch = (
        "t = torch.ones(3)\n"
        "call = dist.isend if rank == 0 else dist.irecv\n"
        "def batch():\n"
        "    for work in dist.batch_isend_irecv([dist.P2POp(call, t, 1 - rank)]):\n"
        "        work.wait()\n"
        "    t.cpu()\n"
    )
    session.execute(f"import time\n{batch}batch()\nkept = rank", timeout=LIMIT_S)
    with Press(session, session.interrupt), pytest.raises(RunInterrupt):
        session.execute("batch() if rank == 1 else time.sleep(60)")
    session.execute("batch()\nfound = t[0].item()", timeout=LIMIT_S)
    assert dict(session.evaluate("(kept, found)")) == {0: (0, 1.0), 1: (1, 1.0)}
