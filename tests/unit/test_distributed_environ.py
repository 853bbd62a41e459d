"""What launchers write into the environment."""

from __future__ import annotations

import pytest

from distsession.distributed.environ import (
    RankEnvironment,
    first_host,
    rank_environment,
    read_environment,
    torchrun_variables,
)
from distsession.errors import OptionsError

SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_NODELIST": "gpu[03-05,9]",
}


def test_nothing_is_found_where_nothing_is_set() -> None:
    assert read_environment({}) is None
    assert read_environment({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None


def test_torchruns_variables_are_read_as_they_are_written() -> None:
    given = rank_environment(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        nodes=2,
        address="here",
        port=29500,
        threads=1,
        run_id="x",
    )
    found = read_environment({**given, **SLURM})
    assert found is not None
    assert (found.source, found.rank, found.world_size) == ("torchrun", 3, 4)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 1)
    assert (found.address, found.port) == ("here", 29500)


def test_what_is_not_known_of_a_place_is_not_written() -> None:
    place = RankEnvironment("Slurm", 3, 4, node_rank=1, address="here")
    plain = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "here"}
    assert torchrun_variables(place) == plain
    assert torchrun_variables(place, roles=True) == {
        **plain,
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
    }


def test_a_rank_has_all_that_torchrun_sets() -> None:
    given = rank_environment(
        rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1, nodes=2,
        address="here", port=29500, threads=2, run_id="x",
    )  # fmt: skip
    assert given == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "here",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "2",
    }


def test_slurms_variables() -> None:
    found = read_environment(SLURM)
    assert found is not None
    assert (found.source, found.rank, found.world_size) == ("Slurm", 5, 6)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 2)
    assert found.address == "gpu03"
    again = read_environment({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert again is not None
    assert found.port == again.port
    assert found.port is not None
    assert 15000 <= found.port < 30000


def test_mpis_variables() -> None:
    found = read_environment(
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "prterun-1@1",
        }
    )
    assert found is not None
    assert (found.source, found.rank, found.address) == ("Open MPI", 1, "127.0.0.1")
    assert found.port is not None
    found = read_environment({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a"})
    assert found is not None
    assert (found.source, found.local_rank, found.address, found.port) == ("PMI", None, "a", None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set.*RANK=0"),
        ({"WORLD_SIZE": "2"}, "RANK is not set.*WORLD_SIZE=2"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but RANK and WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"},
            "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2",
        ),
        ({"SLURM_PROCID": "0"}, "SLURM_NPROCS is not set|SLURM_NTASKS is not set"),
        ({"PMI_SIZE": "2"}, "PMI_RANK is not set"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "many"}, "SLURM_TASKS_PER_NODE='many'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_wrong_and_partial_variables_are_named(given: dict[str, str], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        read_environment(given)


@pytest.mark.parametrize("given", [{"RANK": "1"}, {"WORLD_SIZE": "2"}])
def test_part_of_a_place_is_ignored_where_another_launcher_says_all(given: dict[str, str]) -> None:
    [(name, value)] = given.items()
    with pytest.warns(UserWarning, match=f"{name}={value} is ignored.*Slurm") as told:
        found = read_environment({**given, **SLURM})
    assert told[0].filename == __file__
    assert found is not None
    assert (found.source, found.rank, found.world_size) == ("Slurm", 5, 6)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("n[1,3]-ib", "n1-ib"),
        ("node-1.cluster,node-2.cluster", "node-1.cluster"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
