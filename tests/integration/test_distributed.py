"""The helpers on a session's ranks, under torchrun, and in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import distsession.distributed as dd
from distsession import RunError, Session
from distsession.distributed.ports import release_port
from distsession.errors import CollectiveError, OptionsError, ProcessGroupError
from tests.integration.distributed_checks import CHECKS
from tests.integration.distributed_marks import LAUNCHERS

ROOT = Path(__file__).parents[2]
LIMIT = 110.0
"""Seconds that a launch may take."""


def environment(**more: object) -> dict[str, str]:
    """This process's variables without any launcher's."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {
        **clean,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **{name: str(value) for name, value in more.items()},
    }


# --- the checks, three ways ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions() -> Iterator[Callable[[int], Session]]:
    opened: dict[int, Session] = {}

    def get(ranks: int) -> Session:
        if ranks not in opened:
            opened[ranks] = Session(ranks, backend="gloo")
        return opened[ranks]

    yield get
    for session in opened.values():
        session.close()


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of each check on each of two ranks."""
    folder = tmp_path_factory.mktemp("torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "tests.integration.distributed_checks", str(folder)]
    [(code, text)] = run([command], [environment()])
    assert code == 0, text[-3000:]
    assert len(list(folder.glob("*.done"))) == 2
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CHECKS)
def test_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith(LAUNCHERS):
            monkeypatch.delenv(variable)
    CHECKS[name]()
    assert not dist.is_initialized()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_session(sessions: Callable[[int], Session], name: str, ranks: int) -> None:
    results = sessions(ranks)[:].run(CHECKS[name])
    assert list(results.values()) == [None] * ranks


@pytest.mark.parametrize("name", CHECKS)
def test_under_torchrun(torchrun: list[dict[str, str]], name: str) -> None:
    """With two ranks; what depends on their number is seen on a session."""
    assert [outcome.get(name, "not reached") for outcome in torchrun] == ["ok"] * 2


def test_a_session_goes_on_after_a_scripts_finalize(sessions: Callable[[int], Session]) -> None:
    def script() -> list[int]:
        dd.initialize("gloo")
        ranks = dd.all_gather(dd.get_rank())
        dd.finalize()
        dd.finalize()
        return dd.all_gather(ranks[dd.get_rank()])

    assert list(sessions(2).run(script).values()) == [[0, 1]] * 2


def test_a_guards_error_is_the_runs_cause(sessions: Callable[[int], Session]) -> None:
    def script() -> None:
        with dd.one_rank_first(1):
            raise LookupError("no data")

    with pytest.raises(RunError) as caught:
        sessions(2)[:].run(script)
    assert isinstance(caught.value.by_rank[1], LookupError)
    assert "rank 1" in str(caught.value.by_rank[0])
    assert isinstance(caught.value.by_rank[0], CollectiveError)


# --- beginning, in every way --------------------------------------------------------------------


def run(
    commands: list[list[str]], environments: list[dict[str, str]], limit: float = LIMIT
) -> list[tuple[int, str]]:
    """Run processes beside each other; all of them end here."""
    started = [
        subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, env in zip(commands, environments, strict=True)
    ]
    deadline = time.monotonic() + limit
    try:
        return [
            (p.returncode, out)
            for p in started
            for out in [p.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]]
        ]
    finally:
        for process in started:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.communicate(timeout=60)


JOIN = """
import json, os, sys
import distsession.distributed as dd
rank, arguments = int(sys.argv[1]), json.loads(sys.argv[2])
if "rank" in arguments: arguments["rank"] = rank
dd.initialize("gloo", timeout=30, **arguments)
place = [dd.get_rank(), dd.get_world_size(), dd.get_local_rank(), dd.get_local_world_size()]
shown = [place, dd.get_nnodes(), dd.all_gather("r%d" % dd.get_rank()), os.environ.get("LOCAL_RANK")]
dd.finalize()
print("SHOWN" + json.dumps([*shown, os.environ.get("LOCAL_RANK")]))
"""


def join(environments: list[dict[str, object]], **arguments: object) -> list[list[object]]:
    """Two processes that join; what each has seen."""
    commands = [
        [sys.executable, "-c", JOIN, str(rank), json.dumps(arguments)]
        for rank in range(len(environments))
    ]
    done = run(commands, [environment(**env) for env in environments])
    for code, text in done:
        assert code == 0, text[-2000:]
    return [json.loads(text.partition("SHOWN")[2]) for _, text in done]


def slurm(rank: int, port: int) -> dict[str, object]:
    return {
        "SLURM_JOB_ID": 4711,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NTASKS": 2,
        "SLURM_NODEID": 0,
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": port,
    }


def open_mpi(rank: int, port: int) -> dict[str, object]:
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        "MASTER_PORT": port,
    }


def pmi(rank: int, port: int) -> dict[str, object]:
    return {"PMI_RANK": rank, "PMI_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def bare(rank: int, port: int) -> dict[str, object]:
    return {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize("launcher", [slurm, open_mpi, pmi, bare])
def test_a_launchers_variables_are_found(
    launcher: Callable[[int, int], dict[str, object]], port: int
) -> None:
    environments = [launcher(rank, port) for rank in range(2)]
    for rank, shown in enumerate(join(environments)):
        tells = launcher in (slurm, open_mpi)
        within = str(rank) if tells else None
        assert shown == [[rank, 2, rank, 2], 1, ["r0", "r1"], within, None]


def test_ranks_meet_at_an_address_that_was_held_for_them() -> None:
    url = dd.get_available_local_url()
    shown = join([{}, {}], init_method=url, rank=None, world_size=2)
    assert [entry[0] for entry in shown] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    release_port(url)


def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    shown = join([{}, {}], init_method=url, rank=None, world_size=2)
    assert [entry[2] for entry in shown] == [["r0", "r1"]] * 2


def test_addresses_differ_and_no_other_program_gets_their_ports() -> None:
    import socket

    urls = {dd.get_available_local_url() for _ in range(20)}
    assert len(urls) == 20
    port = int(next(iter(urls)).rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    for url in urls:
        release_port(url)


def test_a_group_of_one_at_an_address() -> None:
    url = dd.get_available_local_url()
    dd.initialize_cpu(0, 1, url)
    try:
        assert (dd.get_world_size(), dd.backend()) == (1, "gloo")
        with pytest.raises(ProcessGroupError, match="nccl"):
            dd.initialize("nccl")
    finally:
        dd.finalize()
    assert not dist.is_initialized()


def test_a_group_of_one_for_a_test() -> None:
    dd.initialize_cpu()
    assert dd.all_gather(3) == [3]
    dd.finalize()
    with pytest.raises(OptionsError, match="init_method"):
        dd.initialize_cpu(0, 2)


def test_a_given_store() -> None:
    dd.initialize("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dd.is_initialized()
    dd.finalize()
    with pytest.raises(OptionsError, match="one of them"):
        dd.initialize("gloo", store=dist.HashStore(), init_method="tcp://127.0.0.1:1")


def test_a_group_made_by_hand_is_followed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert (dd.backend(), dd.model_name()) == ("gloo", "native-dist")
        dd.finalize()
        assert dist.is_initialized()
        dd.finalize(force=True)
        assert not dd.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    url = dd.get_available_local_url()
    began = time.monotonic()
    with pytest.raises(ProcessGroupError, match="rank 0 of 2"):
        dd.initialize("gloo", init_method=url, rank=0, world_size=2, timeout=1)
    assert time.monotonic() - began < 30
    assert not dist.is_initialized()
    release_port(url)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(OptionsError, match="rank=2"):
        dd.initialize("gloo", rank=2, world_size=2)
    with pytest.raises(OptionsError, match="http"):
        dd.initialize("gloo", init_method="http://x", rank=0, world_size=2)
    with pytest.raises(OptionsError, match="world_size"):
        dd.initialize("gloo", rank=0)
    with pytest.raises(OptionsError, match="MASTER_ADDR and MASTER_PORT"):
        dd.initialize("gloo", rank=0, world_size=2)
    with pytest.raises(OptionsError, match="nccl"):
        dd.initialize("nccl")


def test_importing_it_loads_neither_the_session_nor_ipyparallel() -> None:
    code = """
    import sys
    import distsession.distributed as dd
    for name in dd.__all__:
        getattr(dd, name)
    unwanted = ("distsession.session", "distsession.protocol", "ipyparallel", "IPython", "zmq")
    print([name for name in unwanted if name in sys.modules])
    """
    done = run([[sys.executable, "-c", textwrap.dedent(code)]], [environment()])
    assert done[0] == (0, "[]\n")
