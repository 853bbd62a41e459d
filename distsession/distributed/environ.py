"""The environment variables by which libraries find their place among the ranks.

Runs in: an engine.

The names and meanings are torchrun's (torch.distributed.run, "Environment Variables").
"""

from __future__ import annotations

__all__ = ["rank_environment"]


def rank_environment(
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    node_rank: int,
    address: str,
    port: int,
    threads: int,
    run_id: str,
) -> dict[str, str]:
    """What torchrun would set for this rank.

    ``TORCHELASTIC_USE_AGENT_STORE`` tells torch that the store at ``MASTER_ADDR:MASTER_PORT`` is
    there already, so that ``init_process_group("env://")`` in user code joins it as a client.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(max(1, world_size // local_world_size)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads),
    }
