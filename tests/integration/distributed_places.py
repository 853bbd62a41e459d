"""Where the helpers for place, beginning and end differ; see ``distributed_sources.py``."""

from __future__ import annotations

import inspect
import os
import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import distsession.distributed as dd
from distsession.distributed.ports import release_port
from distsession.errors import (
    OptionsError,
    ProcessGroupError,
)
from tests.integration.distributed_marks import (
    LAUNCHERS,
    here,
    logged,
    parameters,
    raises,
    shows,
    silent,
    variables,
)

SLURM = {
    "SLURM_JOB_ID": 4711,
    "SLURM_PROCID": 1,
    "SLURM_LOCALID": 1,
    "SLURM_NTASKS": 2,
    "SLURM_NODEID": 0,
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "localhost",
}


# --- where am I ---------------------------------------------------------------------------------


@shows("ignite", "available_backends", "`ucc`, too.", "No XLA, no Horovod.")
def check_backends_are_torchs() -> None:
    with patch.object(dist, "is_ucc_available", lambda: True):
        assert "ucc" in dd.available_backends()
    assert set(dd.available_backends()) <= {"gloo", "nccl", "mpi", "ucc"}


@shows(
    "ignite",
    "device",
    "With gloo the CPU, even beside a GPU.",
    "Not MPS.",
    "No warning about the current GPU.",
)
def check_the_device_is_that_of_the_backend() -> None:
    cpu, grouped = torch.device("cpu"), dist.is_initialized()
    with patch.object(torch.cuda, "is_available", lambda: True):
        assert dd.device() == (cpu if grouped else torch.device("cuda"))
    with (
        patch.object(torch.cuda, "is_available", lambda: False),
        patch.object(torch.backends.mps, "is_available", lambda: True),
    ):
        assert dd.device() == cpu
    if grouped:
        dd.set_local_rank(3)
        with (
            patch.object(dist, "get_backend", lambda *_: "nccl"),
            patch.object(torch.cuda, "current_device", lambda: 0),
            silent(),
        ):
            assert dd.device() == torch.device("cuda", 0)
        dd.sync()


@shows("ignite", "model_name", "`serial` or `native-dist`.")
def check_model_names() -> None:
    assert dd.model_name() == ("native-dist" if dist.is_initialized() else "serial")


@shows("ignite", "get_rank", "Takes a group or a list of ranks, too.")
@shows("ignite", "get_world_size", "Takes a group or a list of ranks, too.")
@shows("torch", "get_global_rank", "Another thing: the rank of this process.")
@shows("torch", "get_rank", "0 without a group.", "Takes a list of ranks, too.")
@shows("torch", "get_world_size", "1 without a group.", "Takes a list of ranks, too.")
@shows("composer", "get_world_size", "1 without a group.")
def check_rank_and_size_of_a_group() -> None:
    rank, n = here()
    assert dd.get_global_rank() == rank
    assert parameters(dd.get_global_rank) == {"group"}
    if not dist.is_initialized():
        assert (dd.get_rank([3, 4]), dd.get_world_size([3, 4])) == (0, 1)
        return
    group = dd.new_group([n - 1])
    for some in (group, [n - 1]):
        own = (0, 1) if rank == n - 1 else (-1, -1)
        assert (dd.get_rank(some), dd.get_world_size(some)) == own
    if rank == 0:  # nobody else takes part
        assert (dd.get_rank([1, 0]), dd.get_world_size((1, 0))) == (0, 2)
        for ask in (dd.get_rank, dd.get_world_size, dd.get_global_rank):
            for wrong in ("abc", ["abc"], 5):
                with raises(OptionsError, repr(wrong)):
                    ask(wrong)
    dd.barrier()


@shows("ignite", "get_local_rank", "`set_local_rank` counts before `LOCAL_RANK`.")
@shows("ignite", "get_nproc_per_node", "Not counted from local ranks.")
@shows("ignite", "sync", "Takes `set_local_rank` back.")
def check_a_local_rank_that_was_said_counts_first() -> None:
    rank, n = here()
    if not dist.is_initialized():
        return
    dd.set_local_rank(7)
    assert (dd.get_local_rank(), dd.get_nproc_per_node()) == (7, n)
    dd.sync()
    assert dd.get_local_rank() == rank


@shows(
    "ignite",
    "set_local_rank",
    "Also for `initialize`.",
    "Refuses what is no whole number from 0.",
)
def check_a_local_rank_that_was_said_holds_when_a_group_begins() -> None:
    grouped = dist.is_initialized()
    dd.set_local_rank(3)
    with dd.process_group("gloo"):
        assert dd.get_local_rank() == 3
    dd.initialize("gloo")
    assert dd.get_local_rank() == 3
    dd.finalize()
    assert dd.get_local_rank() == (3 if grouped else 0)
    dd.sync()
    for wrong in (None, "1", -1, 0.5, True):
        with raises(OptionsError, "whole number from 0"):
            dd.set_local_rank(wrong)  # type: ignore[arg-type]


@shows(
    "ignite",
    "get_local_rank",
    "Where nothing says it, hosts are told through the store, not in a collective and without "
    "a warning.",
)
@shows("composer", "get_local_rank", "In a group no variable is needed.")
@shows("composer", "get_local_world_size", "In a group no variable is needed.")
@shows("composer", "get_node_rank", "In a group no variable is needed.")
def check_places_without_variables() -> None:
    rank, n = here()
    dd.barrier()
    with variables():
        dd.sync()
        if rank == n - 1:  # in no step with the others, for they do something else meanwhile
            time.sleep(0.05)
        with silent():
            assert (dd.get_local_rank(), dd.get_local_world_size()) == (rank, n)
            assert (dd.get_node_rank(), dd.get_nnodes()) == (0, 1)
    dd.sync()


@shows(
    "all of them",
    "",
    "Without a process group this is rank 0 of 1, whatever the environment says.",
    "`get_global_rank` and `read_environment` say what a launcher has set.",
)
@shows("composer", "get_global_rank", "The group's, whatever `RANK` says.")
@shows("composer", "get_world_size", "The group's, whatever `WORLD_SIZE` says.")
@shows("composer", "get_local_rank", "0 without a group; see `read_environment`.")
@shows("composer", "get_local_world_size", "1 without a group.")
@shows("composer", "get_node_rank", "0 without a group.")
def check_variables_do_not_count_against_the_group() -> None:
    rank, n = here()
    with variables(RANK=8, WORLD_SIZE=9, LOCAL_RANK=2, LOCAL_WORLD_SIZE=3, NODE_RANK=2):
        dd.sync()
        assert here() == (rank, n)
        assert dd.get_global_rank() == (rank if dist.is_initialized() else 8)
        if not dist.is_initialized():
            assert (dd.get_local_rank(), dd.get_local_world_size(), dd.get_node_rank()) == (0, 1, 0)
            place = dd.read_environment()
            assert place is not None
            assert (place.local_rank, place.local_world_size, place.node_rank) == (2, 3, 2)
    dd.sync()


@shows(
    "composer",
    "",
    "Without a process group composer raises where `WORLD_SIZE` is more than 1.",
    "Here this is a world of one.",
)
def check_without_a_group_this_is_a_world_of_one() -> None:
    if dist.is_initialized():
        return
    with variables(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2):
        x = torch.ones(2)
        assert dd.all_reduce(x) is x
        assert dd.broadcast(x) is x
        assert dd.all_gather(1) == dd.all_gather_object(1) == [1]
        assert dd.barrier() is None
        items = [1]
        dd.broadcast_object_list(items)
        assert items == [1]
        with dd.run_local_rank_zero_first():
            pass


@shows(
    "ignite",
    "show_config",
    "Returns the text, too.",
    "One record of another logger, with other words.",
)
def check_what_show_config_shows() -> None:
    with logged() as records:
        text = dd.show_config()
    assert records == [text]
    assert f"num processes per node: {dd.get_nproc_per_node()}" in text


@shows("all of them", "", "A group made by hand with `init_process_group` is followed.")
@shows("ignite", "sync", "Seldom needed: groups are followed without it.")
def check_groups_are_followed() -> None:
    if dist.is_initialized():
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert (dd.is_initialized(), dd.backend()) == (True, "gloo")
    finally:
        dist.destroy_process_group()
    assert (dd.is_initialized(), dd.backend()) == (False, None)


@shows("torch", "get_backend", "None without a group.", "Of the world only.")
def check_the_backend() -> None:
    assert dd.backend() == ("gloo" if dist.is_initialized() else None)
    assert parameters(dd.backend) == set()


@shows("ignite", "has_native_dist_support", "A function.")
def check_is_available_is_a_function() -> None:
    assert dd.is_available() is True


@shows(
    "DI-engine",
    "get_link, is_fake_link",
    "There is no linklink: a fake one stands for no process group.",
)
def check_is_initialized_is_the_other_way_round() -> None:
    assert dd.is_initialized() is dist.is_initialized()


# --- begin and end ------------------------------------------------------------------------------


@shows("ignite", "initialize", "The backend can be left out.", "Joins a group that is there.")
@shows("torch", "init_process_group", "Takes seconds, too.")
@shows("torch", "init_process_group", "Without a backend it is gloo or NCCL, not both.")
@shows("DI-engine", "dist_init", "Returns nothing.")
@shows("DI-engine", "dist_finalize", "Harmless where nothing was begun.")
@shows("torch", "destroy_process_group", "Harmless where nothing was begun.")
@shows("torch", "destroy_process_group", "Ends only what `initialize` began.", "Takes no group.")
@shows("ignite", "finalize", "Ends only what `initialize` began, or anything with `force=True`.")
def check_initialize_and_finalize() -> None:
    grouped, n = dist.is_initialized(), dd.get_world_size()
    if not grouped:
        dd.finalize()
    for limit in (30, 30.5, timedelta(seconds=30)):
        assert dd.initialize(timeout=limit) is None
        assert (dd.backend(), dd.get_world_size()) == ("gloo", n)
        dd.finalize()
        assert dist.is_initialized() is grouped
    assert parameters(dd.finalize) == {"force"}
    if not grouped:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dd.initialize("gloo")
        dd.finalize()
        assert dist.is_initialized()
        dd.finalize(force=True)
        assert not dist.is_initialized()


@shows(
    "ignite",
    "initialize",
    "Takes `tcp://`, and `rank` and `world_size` without an `init_method`.",
    "Neither `LOCAL_RANK` nor, alone, an address is needed.",
    "Sets no variables but in place of Slurm's and MPI's.",
)
@shows("composer", "initialize_dist", "No variables are set for a world of one.")
@shows("torch", "init_process_group", "A store needs no rank.")
@shows("flame", "init_cpu_process_group", "No warning; alone it needs no address.")
def check_a_group_of_one_begins_in_every_way() -> None:
    if dist.is_initialized():
        return
    url = dd.get_available_local_url()
    ways: list[dict[str, Any]] = [
        {},
        {"init_method": None},
        {"init_method": "env://"},
        {"init_method": "env://?rank=0&world_size=1"},
        {"rank": -1, "world_size": -1},
        {"rank": 0, "world_size": 1},
        {"store": dist.HashStore()},
        {"store": dist.HashStore(), "rank": 0, "world_size": 1},
        {"init_method": url, "rank": 0, "world_size": 1},
        {"init_method": f"{url}?rank=0&world_size=1"},
        {"init_method": f"{url}?use_libuv=0&rank=0&world_size=1"},
    ]
    for way in ways:
        with variables(), dd.process_group("GLOO", **way):
            assert (here(), dd.backend()) == ((0, 1), "gloo")
            assert not [name for name in os.environ if name.startswith(LAUNCHERS)]
    with variables(RANK=0, WORLD_SIZE=1), dd.process_group("gloo"):
        assert here() == (0, 1)
    with variables(**{**SLURM, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 1}):
        os.environ["SLURM_STEP_TASKS_PER_NODE"] = "1"
        with dd.process_group("gloo"):
            assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("0", "0")
        assert "RANK" not in os.environ
    url = dd.get_available_local_url()
    calls: list[dict[str, Any]] = [{}, {"init_method": url}, {"dist_url": url}]
    for call in calls:
        with silent():
            dd.initialize_cpu(**call)
        assert (here(), dd.backend()) == ((0, 1), "gloo")
        dd.finalize()
    with raises(OptionsError, "dist_url="):
        dd.initialize_cpu(0, 1, url, dist_url=url)


@shows(
    "ignite",
    "initialize",
    "No GPU for NCCL, and variables that are missing, are a `ValueError`.",
)
@shows(
    "torch",
    "init_process_group",
    "Takes all but the backend by name.",
    "Knows no other addresses than `env://`, `tcp://` and `file://`.",
    "Arguments that cannot work are a `ValueError`.",
)
@shows("composer", "MissingEnvironmentError", "`OptionsError` names the variables.")
@shows("DI-engine", "dist_init", "Has no `method` and no number of a GPU.")
def check_arguments_that_cannot_work_are_named() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "'abc'": {"backend": "abc"},
        "'cpu:abc'": {"backend": "cpu:abc"},
        "backend=5": {"backend": 5},
        "'slurm'": {"backend": "slurm"},
        "device_number=": {"device_number": 0},
        "method=": {"method": "slurm"},
        "rank='0'": {"rank": "0", "world_size": 1},
        "world_size=True": {"rank": 0, "world_size": True},
        "timeout='30'": {"timeout": "30"},
        "timeout=0": {"timeout": 0},
        "timeout=nan": {"timeout": float("nan")},
        "timeout=-1": {"timeout": -1},
        "one of them": {"store": dist.HashStore(), "init_method": "env://"},
        "rank='x'": {"init_method": "tcp://127.0.0.1:1?rank=x&world_size=1"},
        "rank= both": {"init_method": "tcp://127.0.0.1:1?rank=0&world_size=1", "rank": 0},
    }
    for url in ("http://x", "tcp://", "tcp://127.0.0.1", "tcp://:1", "tcp://h:99999", "", 5):
        wrong[f"init_method={url!r}"] = {"init_method": url, "rank": 0, "world_size": 1}
    for word, options in wrong.items():
        with raises(OptionsError, word):
            dd.initialize(**options)
    with pytest.raises(TypeError):
        dd.initialize("gloo", "env://")  # type: ignore[misc]
    if not dist.is_initialized():
        with variables():
            with raises(OptionsError, "rank=", "world_size="):
                dd.initialize("gloo", rank=0)
            with raises(OptionsError, "rank=2"):
                dd.initialize("gloo", rank=2, world_size=2)
            no_gpu = patch.object(torch.cuda, "is_available", lambda: False)
            for name in ("NCCL", "nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl-legacy"):
                with no_gpu, raises(OptionsError, "nccl"):
                    dd.initialize(name)
        with variables(RANK=0), raises(OptionsError, "WORLD_SIZE"):
            dd.initialize("gloo")


@shows("composer", "initialize_dist", "Takes a backend, not a device.")
@shows("composer", "initialize_dist", "The limit of time is torch's.")
@shows(
    "torch",
    "init_process_group",
    "Joins a group that is there; another one is a `RuntimeError`.",
)
def check_a_device_is_no_backend() -> None:
    with raises(OptionsError, "'cpu'"):
        dd.initialize("cpu")
    assert inspect.signature(dd.initialize).parameters["timeout"].default is None
    if dist.is_initialized():
        world = dist.group.WORLD
        others: list[dict[str, Any]] = [
            {"backend": "nccl"},
            {"world_size": dd.get_world_size() + 1},
            {"rank": dd.get_rank() + 1},
        ]
        for other in others:
            with raises(ProcessGroupError, "finalize(force=True)"):
                dd.initialize(**other)
        assert dist.group.WORLD is world


@shows(
    "ignite",
    "",
    "Under Slurm `RANK` and `WORLD_SIZE` together count before Slurm's own variables, whatever "
    "these are, and arguments before both.",
    "Ranks meet at another port than ignite's.",
    "A shell of `salloc` is no rank.",
)
@shows("torch", "init_process_group", "Finds Slurm's and MPI's variables; alone it makes a group "
       "of one; can be repeated.")  # fmt: skip
def check_slurms_variables_and_others() -> None:
    with variables(**SLURM):
        place = dd.read_environment()
        assert place is not None
        assert (place.source, place.rank, place.world_size) == ("Slurm", 1, 2)
        assert place.port not in (None, 15000 + 4711)
    with variables(**SLURM, RANK=0, WORLD_SIZE=8):
        place = dd.read_environment()
        assert place is not None
        assert (place.source, place.rank, place.world_size) == ("torchrun", 0, 8)
    for name in ("RANK", "WORLD_SIZE"):
        with variables(**SLURM, **{name: 1}):
            with pytest.warns(UserWarning, match=f"{name}=1 is ignored.*Slurm"):
                place = dd.read_environment()
            assert place is not None
            assert place.source == "Slurm"
    with variables(SLURM_JOB_ID=1, SLURM_NTASKS=2, SLURM_JOB_NODELIST="a"):
        assert dd.read_environment() is None
    if not dist.is_initialized():
        with variables(**SLURM), dd.process_group("gloo", rank=0, world_size=1,
                                                  store=dist.HashStore()):  # fmt: skip
            assert here() == (0, 1)
        for _ in range(2):
            with variables(), dd.process_group("gloo"):
                assert here() == (0, 1)


@shows("ignite", "Parallel", "In a script that a launcher starts: `process_group`.")
@shows("DI-engine", "dist_mode", "Returns the function's value; ends when it raises.")
def check_a_decorated_function() -> None:
    grouped = dist.is_initialized()

    @dd.process_group
    def work(x: int) -> float:
        assert dist.is_initialized()
        return 1 / x

    assert work(1) == 1.0
    with pytest.raises(ZeroDivisionError):
        work(0)
    assert dist.is_initialized() is grouped


@shows("flame", "get_available_local_dist_url", "The port stays free until it is used.")
def check_an_address_stays_free() -> None:
    import socket

    url = dd.get_available_local_url()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(url.rpartition(":")[2])))
    release_port(url)
