"""The environment variables by which libraries find their place among the ranks.

``rank_environment`` and ``torchrun_variables`` write those of torchrun (torch.distributed.run,
"Environment Variables"); no other module names them to set them.
``read_environment`` reads what torchrun, Slurm, Open MPI or a PMI launcher (MPICH, Intel MPI, Cray)
has set.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from distsession.errors import OptionsError

__all__ = [
    "RankEnvironment",
    "first_host",
    "rank_environment",
    "read_environment",
    "torchrun_variables",
]

FIRST_PORT, PORTS = 15_000, 15_000
"""Where ports are that a job's number stands for: below those that systems give away."""


@dataclass(frozen=True)
class RankEnvironment:
    """What a launcher says about this process; None where it does not say.

    Attributes:
        source: Whose variables these are.
        rank: Of this process in the world.
        world_size: Number of processes.
        local_rank: Of this process on its host.
        local_world_size: Number of processes on its host.
        node_rank: Of its host.
        address: Of the host where the ranks meet, that of rank 0.
        port: Where they meet.
        nodes: Number of hosts.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    address: str | None = None
    port: int | None = None
    nodes: int | None = None


_TORCHRUN = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
    "MASTER_ADDR": "address",
    "MASTER_PORT": "port",
}
"""torchrun's variables by which code finds its place, and what of a place each holds."""

_TORCHRUN_ROLES = {
    "NODE_RANK": "node_rank",
    "GROUP_RANK": "node_rank",
    "GROUP_WORLD_SIZE": "nodes",
    "ROLE_RANK": "rank",
    "ROLE_WORLD_SIZE": "world_size",
}
"""The same, of those that torchrun has for groups of hosts and for roles."""


def torchrun_variables(place: RankEnvironment, *, roles: bool = False) -> dict[str, str]:
    """A place as torchrun would write it into the environment; without what is not known of it.

    Args:
        place: Of a rank, whoever has said it.
        roles: Also what torchrun sets for groups of hosts and for roles.
    """
    table = {**_TORCHRUN, **_TORCHRUN_ROLES} if roles else _TORCHRUN
    values = {name: getattr(place, fact) for name, fact in table.items()}
    return {name: str(value) for name, value in values.items() if value is not None}


def rank_environment(
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    node_rank: int,
    nodes: int,
    address: str,
    port: int,
    threads: int,
    run_id: str,
) -> dict[str, str]:
    """What torchrun would set for this rank.

    All but ``TORCHELASTIC_USE_AGENT_STORE``. By it, programs that a rank starts would wait for a
    store that somebody else holds at their own ``MASTER_PORT``. On a rank itself groups meet in the
    session's store, whatever the port.
    """
    place = RankEnvironment(
        "torchrun", rank, world_size, local_rank, local_world_size, node_rank, address, port, nodes
    )
    return {
        **torchrun_variables(place, roles=True),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "OMP_NUM_THREADS": str(threads),
    }


@dataclass(frozen=True)
class _Family:
    """How a launcher names what it sets; of several names the first that is set counts."""

    source: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    detected_by: tuple[str, ...] = ()


_FAMILIES = (
    _Family(
        source="torchrun",
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        nodes=("GROUP_WORLD_SIZE",),
        detected_by=("RANK", "WORLD_SIZE"),
    ),
    _Family(
        source="Slurm",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES",),
        job=("SLURM_JOB_ID", "SLURM_JOBID"),
        detected_by=(
            "SLURM_PROCID",
        ),  # a shell of salloc has the other variables, too, but is no rank
    ),
    _Family(
        source="Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        detected_by=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ),
    _Family(
        source="PMI",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("PMI_JOBID", "PALS_APID"),
        detected_by=("PMI_RANK", "PMI_SIZE"),
    ),
)


def read_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """This process's place, as its launcher has written it into the environment.

    torchrun's variables count before those of Slurm, Open MPI and PMI, since torchrun may itself
    have been started by one of them. Where only one of ``RANK`` and ``WORLD_SIZE`` is set, and
    another launcher has said both, a warning names what is ignored.

    Args:
        environ: The variables. Default: this process's.

    Returns:
        The place; None where no launcher has set anything.

    Raises:
        OptionsError: Variables are missing, are no numbers, or contradict each other; the message
            names them.
    """
    given = os.environ if environ is None else environ
    partial: list[_Family] = []
    for family in _FAMILIES:
        if any(given.get(name) for name in family.detected_by):
            if _first(family.rank, given) and _first(family.world_size, given):
                if partial:
                    _warn_of(partial, family, given)
                return _read(family, given)
            partial.append(family)
    if partial:
        return _read(partial[0], given)
    if given.get("LOCAL_RANK"):
        raise OptionsError(
            f"LOCAL_RANK={given['LOCAL_RANK']} is set, but RANK and WORLD_SIZE are not: set all "
            "three, or start the script with torchrun."
        )
    return None


def _warn_of(partial: list[_Family], taken: _Family, given: Mapping[str, str]) -> None:
    names = [name for family in partial for name in (*family.rank, *family.world_size)]
    found = ", ".join(f"{name}={given[name]}" for name in names if given.get(name))
    warnings.warn(
        f"{found} is ignored, since it is not all of a rank's place: {taken.source}'s variables "
        "are taken.",
        stacklevel=3,
    )


def _read(family: _Family, given: Mapping[str, str]) -> RankEnvironment:
    rank = _number(family.rank, given)
    world_size = _number(family.world_size, given, least=1)
    for value, names, known in (
        (rank, family.rank, family.world_size),
        (world_size, family.world_size, family.rank),
    ):
        if value is None:
            found = ", ".join(f"{n}={given[n]}" for n in known if given.get(n))
            raise OptionsError(
                f"{names[-1]} is not set, but {found or 'others'} of {family.source} is: each rank "
                f"needs both {family.rank[0]} and {family.world_size[-1]}."
            )
    assert rank is not None
    assert world_size is not None
    local_rank = _number(family.local_rank, given)
    local_world_size = _number(family.local_world_size, given, least=1)
    node_rank = _number(family.node_rank, given)
    if family.source == "Slurm":
        local_world_size = _slurm_tasks_here(given, node_rank or 0)
    _below(rank, family.rank, world_size, family.world_size, given)
    _below(local_rank, family.local_rank, local_world_size, family.local_world_size, given)
    _below(local_rank, family.local_rank, world_size, family.world_size, given)
    if local_world_size is not None and local_world_size > world_size:
        raise OptionsError(
            f"{_shown(family.local_world_size, given)} is more than "
            f"{_shown(family.world_size, given)}: a host cannot have more ranks than the world."
        )
    address = given.get("MASTER_ADDR") or None
    if address is None and family.source != "torchrun" and local_world_size == world_size:
        address = "127.0.0.1"
    if address is None and family.source == "Slurm":
        hosts = _first(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"), given)
        address = first_host(given[hosts]) if hosts else None
    port = _number(("MASTER_PORT",), given, least=1)
    job = _first(family.job, given)
    if port is None and job is not None:
        named = f"{given[job]}.{given.get('SLURM_STEP_ID', '')}"
        port = FIRST_PORT + zlib.crc32(named.encode()) % PORTS
    return RankEnvironment(
        source=family.source,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        address=address,
        port=port,
        nodes=_number(family.nodes, given, least=1),
    )


def _first(names: tuple[str, ...], given: Mapping[str, str]) -> str | None:
    return next((name for name in names if given.get(name)), None)


def _shown(names: tuple[str, ...], given: Mapping[str, str]) -> str:
    name = _first(names, given)
    return f"{name}={given[name]}" if name else "what Slurm says"


def _number(names: tuple[str, ...], given: Mapping[str, str], least: int = 0) -> int | None:
    name = _first(names, given)
    if name is None:
        return None
    if not re.fullmatch(r"\d+", given[name].strip()) or int(given[name]) < least:
        raise OptionsError(f"{name}={given[name]!r} is not a whole number from {least}.")
    return int(given[name])


def _below(
    value: int | None,
    names: tuple[str, ...],
    limit: int | None,
    limit_names: tuple[str, ...],
    given: Mapping[str, str],
) -> None:
    if value is not None and limit is not None and value >= limit:
        raise OptionsError(
            f"{_shown(names, given)} is not below {_shown(limit_names, given)}: "
            f"ranks count from 0 to {limit - 1}."
        )


def _slurm_tasks_here(given: Mapping[str, str], node: int) -> int | None:
    """Tasks on this node, from a text like ``2(x3),1``: three nodes with two, one with one."""
    name = _first(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), given)
    if name is None:
        return _number(("SLURM_NTASKS_PER_NODE",), given, least=1)
    counts: list[int] = []
    for part in given[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise OptionsError(f"{name}={given[name]!r} is not of the form 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise OptionsError(f"SLURM_NODEID={node} is not below the {len(counts)} nodes of {name}.")
    return counts[node]


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as ``gpu[03-05,9],login``: here ``gpu03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", hosts.strip())
    if match is None:
        raise OptionsError(f"the list of hosts {hosts!r} has no first host: set MASTER_ADDR.")
    return "".join(part or "" for part in match.groups())
