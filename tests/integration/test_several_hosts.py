"""Hosts with different numbers of ranks, played by one machine, and the ranks of some of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from distsession import CollectiveHangError, EngineDiedError, OptionsError, RunError, Session
from distsession.cluster.local import LocalLauncher
from distsession.ranks import Host

from .kernel import Notebook

VARIABLES = ("RANK", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


@pytest.fixture(scope="module", params=[True, False], ids=["one board", "boards apart"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Three ranks, two of them on the second node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalLauncher, "shares_board", request.param)
        with Session(ranks_per_host=[1, 2], backend="gloo") as session:
            yield session


def reduced(session: Session) -> list[float]:
    session.execute("t = torch.full((3,), rank + 1.0)\ndist.all_reduce(t)")
    return [float(value[0]) for value in session.pull("t").values()]


def test_each_rank_knows_its_place(session: Session) -> None:
    session.execute("import os")
    values = session.evaluate(f"[int(os.environ[name]) for name in {VARIABLES}]")
    assert list(values.values()) == [[0, 0, 0, 1, 2], [1, 1, 0, 2, 2], [2, 1, 1, 2, 2]]
    facts = [(info.node_rank, info.nodes, info.local_rank) for info in session.infos]
    assert facts == [(0, 2, 0), (1, 2, 0), (1, 2, 1)]
    assert [info.local_world_size for info in session.infos] == [1, 2, 2]
    session.execute("from distsession.distributed import get_nnodes, get_node_rank")
    assert list(session.evaluate("get_nnodes(), get_node_rank()").values()) == [
        (2, 0), (2, 1), (2, 1),
    ]  # fmt: skip


def test_collectives_and_payloads_reach_all(session: Session) -> None:
    assert reduced(session) == [6.0] * 3
    x = torch.randn(300_000)
    session.push(x=x)
    assert all(torch.equal(value, x) for value in session.pull("x").values())
    with pytest.raises(RunError, match=r"all_reduce|broadcast"):
        session.execute("dist.all_reduce(x) if rank > 0 else dist.broadcast(x, 0)")
    assert reduced(session) == [6.0] * 3


def test_who_waits_for_whom_is_known_of_every_rank_of_a_node(session: Session) -> None:
    with pytest.raises(
        CollectiveHangError, match=r"ranks 0-1 did not come to barrier .* rank 2 waits"
    ):
        session.execute("if rank == 2: dist.barrier()")
    assert reduced(session) == [6.0] * 3


def test_ranks_of_a_node_compare_before_tensors_are_changed(session: Session) -> None:
    session.execute("pair = dist.new_group([1, 2])\nx = torch.full((rank + 1,), float(rank))")
    with pytest.raises(RunError, match=r"^CollectiveMismatchError") as caught:
        session.execute("if rank: dist.all_reduce(x, group=pair)")
    assert "different nodes" not in "\n".join(caught.value._render_traceback_())
    assert [value.tolist() for value in session[1:].pull("x").values()] == [[1.0] * 2, [2.0] * 3]
    assert reduced(session) == [6.0] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_of_either_node_is_replaced(session: Session, rank: int) -> None:
    session.execute("kept = rank")
    before = [info.pid for info in session.infos]
    session.restart(rank)
    after = [info.pid for info in session.infos]
    assert [old == new for old, new in zip(before, after, strict=True)] == [
        other != rank for other in range(3)
    ]
    assert reduced(session) == [6.0] * 3
    assert list(session.evaluate("'kept' in globals()").values()) == [
        other != rank for other in range(3)
    ]


def test_a_rank_that_is_killed_is_told_with_its_host(session: Session) -> None:
    with pytest.raises(RunError) as caught:
        session.execute(f"import os\nif rank == 2: os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert isinstance(caught.value.by_rank[2], EngineDiedError)
    assert "rank 2 is dead (on node1; 3 ranks, gloo)" in session.status()
    session.restart(2)
    assert reduced(session) == [6.0] * 3


def test_the_hosts_are_named_with_their_ranks(session: Session) -> None:
    assert session.hosts == (Host("node0", 0, (0,)), Host("node1", 1, (1, 2)))
    text = repr(session.show_config())
    assert "hosts           node0 (rank 0), node1 (ranks 1-2)" in text
    assert "ranks per node  1, 2" in text
    assert [line.split()[:3] for line in repr(session.diagnose()).splitlines()[-3:]] == [
        ["0", "node0", "idle"], ["1", "node1", "idle"], ["2", "node1", "idle"],
    ]  # fmt: skip


def test_the_ranks_of_a_host_run_by_its_name_or_number(session: Session) -> None:
    assert dict(session.on("node1").run(os.getpid)) == {
        rank: session.infos[rank].pid for rank in (1, 2)
    }
    assert session.on(0).ranks == (0,)
    assert session.on("node0", 1).ranks == (0, 1, 2)
    said = r"no host 'nod1': this session has node0 \(rank 0\), node1 \(ranks 1-2\)\. .*node1\?"
    with pytest.raises(OptionsError, match=said):
        session.on("nod1")


def test_an_error_names_the_host_in_its_first_line(session: Session) -> None:
    with pytest.raises(RunError, match=r"^ZeroDivisionError on ranks 1-2 \(node1\) at "):
        session.on("node1").execute("1 / 0")


def test_a_timeline_names_the_hosts(session: Session) -> None:
    reduced(session)
    timeline = session.timeline()
    rows = [line.split()[:2] for line in repr(timeline).splitlines()[-3:]]
    assert rows == [["0", "node0"], ["1", "node1"], ["2", "node1"]]
    assert "<title>node1</title>" in timeline._repr_html_()


def test_one_machine_is_one_host() -> None:
    with Session(2, backend="gloo") as session:
        (host,) = session.hosts
        assert host == Host(session.infos[0].host, 0, (0, 1))
        assert session.on(host.name).ranks == (0, 1)
        assert "host" not in repr(session.diagnose())
        with pytest.raises(RunError, match=r"^ZeroDivisionError on ranks 0-1 at "):
            session.execute("1 / 0")


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    shown = notebook.run(
        "%load_ext distsession\n%session start --ranks-per-host 2,1 --backend gloo"
    )
    assert "3 ranks, gloo" in shown.result, shown
    yield notebook
    notebook.close()


def complete(notebook: Notebook, code: str) -> list[str]:
    reply = notebook.client.complete(code, len(code), reply=True, timeout=60)["content"]
    return [code[: reply["cursor_start"]] + match for match in reply["matches"]]


def test_a_cell_runs_on_the_ranks_of_a_host(notebook: Notebook) -> None:
    notebook.run("%%distributed --on node1\nthere = rank")
    shown = notebook.run("%%distributed\nprint('there' in globals())")
    assert shown.plain.count("True") == 1
    assert "[rank 2] True" in shown.plain
    error = notebook.run("%%distributed --on gpu7\n1")
    assert "there is no host 'gpu7': this session has node0" in error.error
    assert "not both" in notebook.run("%%distributed 0 --on node1\n1").error


def test_the_names_of_hosts_are_completed(notebook: Notebook) -> None:
    offered = complete(notebook, "%%distributed --on n")
    assert offered == ["%%distributed --on node0", "%%distributed --on node1"]
    offered = complete(notebook, "%session restart --hosts n")
    assert offered == ["%session restart --hosts node0", "%session restart --hosts node1"]
    assert complete(notebook, "%%distributed --on node1\nther") == [
        "%%distributed --on node1\nthere"
    ]


def test_the_ranks_of_a_host_are_replaced_by_its_name(notebook: Notebook) -> None:
    pids = "%%distributed --out pids\nimport os\nos.getpid()"
    notebook.run(f"{pids}")
    notebook.run("before = dict(pids)\n%session restart --hosts node1")
    notebook.run(pids)
    shown = notebook.run("[before[rank] == pids[rank] for rank in range(3)]")
    assert shown.result == "[True, True, False]"
    assert "no host 'gpu7'" in notebook.run("%session restart --hosts gpu7").error
    error = notebook.run("%session restart --hosts node1=gpu7").error
    assert "another host can take the place of one" in error
