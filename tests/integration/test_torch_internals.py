"""What of torch is not public and we rely on; a torch that changes it fails here."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distsession import RunError, Session
from distsession.engine.collectives import torch_changes, torch_private


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(2, threads=1) as session:
        yield session


def test_every_group_is_made_by_the_function_that_we_stand_before() -> None:
    parameters = inspect.signature(c10d._new_process_group_helper).parameters
    assert "backend" in parameters
    for maker in (c10d.init_process_group, c10d._new_group_with_tag):
        assert "_new_process_group_helper" in inspect.getsource(maker)


def test_all_is_there_that_we_lean_on() -> None:
    assert torch_changes.sentences() == ()


@pytest.mark.parametrize("name", ["pg_map", "pg_backend_config", "group_count"])
def test_the_world_has_its_tables(name: str) -> None:
    assert hasattr(c10d._world, name)


@pytest.mark.parametrize(
    "name",
    ["_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper"],
)
def test_data_parallel_can_be_given_a_new_reducer(name: str) -> None:
    assert callable(getattr(torch.nn.parallel.DistributedDataParallel, name))


def test_communicators_can_be_aborted() -> None:
    assert callable(c10d._abort_process_group)


def test_options_say_whether_the_caller_waits() -> None:
    assert dist.AllreduceOptions().asyncOp is True
    assert dist.BroadcastOptions().asyncOp is True


def test_reduce_ops_are_told_apart_by_their_hashes() -> None:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    options = dist.AllreduceOptions()
    for op in ops:
        options.reduceOp = op
        assert hash(options.reduceOp) == hash(op)
    assert len({hash(op) for op in ops}) == len(ops)


def test_a_wait_with_a_limit_says_so_when_it_is_over(session: Session) -> None:
    with pytest.raises(RunError, match="rank 1 did not come to all_reduce"):
        session.execute(
            "import datetime\n"
            "if rank == 0:\n"
            "    work = dist.all_reduce(torch.ones(1), async_op=True)\n"
            "    work.wait(datetime.timedelta(seconds=0.2))"
        )
    session.execute("dist.barrier()")  # the group has been connected anew


def test_groups_are_ours_whoever_asks_for_them_and_say_gloo(session: Session) -> None:
    kinds = session.execute(
        "pair = dist.new_group([0, 1])\n"
        "mine = [type(g).__name__ for g in (dist.group.WORLD, pair)]\n"
        "mine + [dist.get_backend(), dist.get_backend(pair)]",
        fetch=True,
    )
    assert kinds is not None
    assert kinds[0] == ["SwappableGroup", "SwappableGroup", "gloo", "gloo"]


def test_what_data_parallel_logs_tells_of_the_backend_within_a_group(session: Session) -> None:
    logged = session.execute(
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "data = ddp._get_ddp_logging_data()\n"
        "[data[n] for n in ('backend_name', 'gloo_device_transport', 'gloo_num_threads')]",
        fetch=True,
    )
    assert logged is not None
    assert logged[0] == ["gloo", "N/A", 2]


def test_functions_of_torch_take_the_default_group_of_the_time_of_the_call(
    session: Session,
) -> None:
    total = session.execute(
        "from torch.distributed import nn as dist_nn\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo')\n"
        "dist_nn.all_reduce(torch.ones(1)).item()",
        fetch=True,
    )
    assert list((total or {}).values()) == [2.0, 2.0]


def test_the_sockets_of_gloo_and_of_its_tcp_store_are_found(session: Session) -> None:
    shut = session.execute(
        "import os\n"
        "from distsession.engine.collectives import abort\n"
        "dist.barrier()\n"
        "if rank: dist.distributed_c10d._get_default_store().set('over', '1')\n"
        "else: dist.distributed_c10d._get_default_store().wait(['over'])\n"
        "gloo = abort.abort_gloo() if rank == 0 else 1  # the other end goes with it\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "client = dist.TCPStore('127.0.0.1', port, None, False, wait_for_workers=False)\n"
        "gloo, abort.abort_store(port)",
        fetch=True,
    )
    assert shut is not None
    for gloo, store in shut.values():
        assert gloo >= 1
        assert store >= 1
    session.restart()
    session.execute("dist.barrier()")


def test_a_fresh_reducer_gives_the_right_gradients(session: Session) -> None:
    same = session.execute(
        "from distsession.engine.collectives import torch_private\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 2))\n"
        "def gradient():\n"
        "    model.zero_grad()\n"
        "    (model(torch.ones(1, 4)) * (rank + 1)).sum().backward()\n"
        "    return model.module.bias.grad.tolist()\n"
        "before = [gradient() for _ in range(3)]\n"
        "reducer = model.reducer\n"
        "torch_private.refresh_modules()\n"
        "assert model.reducer is not reducer\n"
        "after = [gradient() for _ in range(3)]\n"
        "before == after, after[0]",
        fetch=True,
    )
    assert same is not None
    assert dict(same) == dict.fromkeys((0, 1), (True, [1.5, 1.5]))


def test_a_module_that_cannot_be_refreshed_is_named_and_keeps_no_group_from_being_connected(
    session: Session,
) -> None:
    session.execute(
        "import warnings\n"
        "from distsession.engine.collectives import torch_private\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 2))\n"
        "other = DistributedDataParallel(torch.nn.Linear(4, 2))\n"
        "reducer, build = other.reducer, model._build_params_for_reducer\n"
        "model._build_params_for_reducer = lambda: build().missing\n"
        "with warnings.catch_warnings(record=True) as warned:\n"
        "    warnings.simplefilter('always')\n"
        "    torch_private.refresh_modules()\n"
        "(text,) = (str(each.message) for each in warned if 'make it again' in str(each.message))\n"
        "assert 'a DistributedDataParallel could not' in text and 'missing' in text, text\n"
        "assert other.reducer is not reducer\n"
        "del model, other, reducer, build"
    )
    session.execute("dist.barrier()")


def test_the_limit_of_a_group_can_be_set_after_it_has_been_connected() -> None:
    assert callable(dist.ProcessGroupGloo._set_default_timeout)


LISTENING = (
    "import psutil\n"
    "probe = torch.ones(1)\n"
    "pair = dist.new_group([0, 1])\n"
    "dist.all_reduce(probe, group=pair)\n"
    "dist.all_reduce(probe)\n"
    "connections = psutil.Process().net_connections('tcp')\n"
    "sum(c.status == psutil.CONN_LISTEN for c in connections)"
)


def test_the_sockets_at_which_gloo_listens_are_found_by_their_address(session: Session) -> None:
    count = session.execute(LISTENING, fetch=True)
    assert count is not None
    assert dict(count) == {0: 0, 1: 0}


def test_gloo_goes_on_listening_where_members_connect_when_they_first_need_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with Session(2, threads=1) as lazy:
        count = lazy.execute(LISTENING, fetch=True)
        assert count is not None
        assert dict(count) == {0: 2, 1: 2}
        lazy.launcher.abort("failed", "so that the group is connected anew")
        lazy.execute("dist.all_reduce(probe)\ndist.all_reduce(probe, group=pair)")


def test_the_addresses_of_members_are_brought_in_one_request(session: Session) -> None:
    session.execute(
        "from distsession.engine import store\n"
        "asked, plain = [], store.Store._await\n"
        "def counted(self, code, keys, *args, **options):\n"
        "    asked.extend([list(keys)] if 'cpu//0/' in keys[0] else [])\n"
        "    return plain(self, code, keys, *args, **options)\n"
        "store.Store._await = counted"
    )
    try:
        session.execute("pair = dist.new_group([0, 1])\ndist.all_reduce(torch.ones(1), group=pair)")
    finally:
        session.execute("store.Store._await = plain")
    for rank, requests in session.evaluate("asked").items():
        ends = [[key.partition("cpu//cpu//")[2] for key in keys] for keys in requests]
        assert ends == [["0/0", "0/1"]], rank  # its own among them, for its port to be closed
    session.execute("dist.destroy_process_group(pair); del pair, asked, store, plain")


def test_code_can_be_hidden_from_the_compiler_without_importing_dynamo() -> None:
    program = (
        "import sys, torch\n"
        "from distsession.engine import rank\n"
        "from distsession.engine.collectives import group, torch_private\n"
        "torch_private.hide_from_compiler()\n"
        "assert group.SwappableGroup.connect._torchdynamo_disable\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_what_is_prepared_for_ranks_leaves_them_nothing_to_look_up_or_to_free() -> None:
    program = (
        "import torch, torch._dynamo\n"
        "from torch._dynamo import trace_rules\n"
        "from distsession.engine.collectives import torch_changes, torch_private\n"
        "trace_rules.get_torch_obj_rule_map()\n"
        "torch_private.prepare_ranks()\n"
        "assert not trace_rules.get_torch_obj_rule_map.cache_info().currsize\n"
        "known = torch_changes._missing.cache_info().misses\n"
        "assert known == len(torch_changes.Part)\n"
        "looked = torch_private._find_graph_classes.cache_info().misses\n"
        "found = torch_private.graph_classes()\n"
        "assert torch_private._find_graph_classes.cache_info().misses == looked\n"
        "class LaterGraph(torch.cuda.CUDAGraph): pass\n"
        "torch.cuda.LaterGraph = LaterGraph\n"
        "assert set(torch_private.graph_classes()) == {*found, LaterGraph}\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_what_is_not_seen_can_be_noted_where_it_begins() -> None:
    found = torch_private.graph_classes()
    assert torch.cuda.CUDAGraph in found
    if hasattr(getattr(torch, "accelerator", None), "Graph"):
        assert torch.accelerator.Graph in found
    names = [name for _, name in torch_private.symmetric_memory_functions()]
    assert names == ["empty_strided_p2p", "rendezvous"]
    assert not torch_private.uses_torchcomms()
    assert not torch_private.is_accelerator_used()


@pytest.mark.skipif(not hasattr(c10d, "ProcessGroupNCCL2"), reason="this torch has no such class")
def test_the_classes_of_nccl_have_what_the_docs_say() -> None:
    classes = [getattr(c10d, f"ProcessGroupNCCL{suffix}") for suffix in ("", "2", "Lazy")]
    page = (Path(__file__).parents[2] / "docs/backends.md").read_text()
    [row] = re.findall(r"^\| Does not have .*$", page, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row):
        assert [hasattr(kind, name) for kind in classes] == [True, False, False], name
    for name in ("abort", "get_error", "perform_nocolor_split", "set_timeout", "split"):
        assert all(hasattr(kind, name) for kind in classes), name
    assert [hasattr(kind, "register_mem_pool") for kind in classes] == [True, True, False]


@pytest.mark.skipif(not hasattr(c10d, "ProcessGroupNCCL2"), reason="this torch has no such class")
@pytest.mark.parametrize("value", ["", "0", "1"])
def test_the_environment_says_which_class_nccl_is(value: str) -> None:
    """A rank has it from the kernel, and torch reads it when the name is first used."""
    program = (
        "from distsession.engine.host_info import host_info\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "names = dict(host_info().backends)\n"
        "assert {'nccl', 'nccl2', 'nccl-lazy', 'nccl-legacy'} <= names.keys(), names\n"
        "assert 'NCCL' not in c10d.Backend._plugins\n"
        "for name in ('nccl', 'nccl2', 'nccl-lazy', 'nccl-legacy'):\n"
        "    c10d.BackendConfig(name)\n"
        "    print(c10d.Backend._plugins[name.upper()].creator_fn.__name__)"
    )
    environment = {**os.environ, "TORCH_DIST_USE_NCCL2": value}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=100,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    default = "_create_nccl_process_group" if value == "0" else "_create_nccl2_process_group"
    assert done.stdout.split() == [
        default,
        "_create_nccl2_process_group",
        "_create_nccl_lazy_process_group",
        "_create_nccl_process_group",
    ]
