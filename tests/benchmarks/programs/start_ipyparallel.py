"""A fresh process that starts ipyparallel engines, which join a group and pass a barrier.

Arguments: engines, a free port.
"""

import sys
import time

import ipyparallel


def join(rank: int, world: int, port: int) -> None:
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    dist.barrier()


def main(world: int, port: int) -> None:
    cluster = ipyparallel.Cluster(n=world)
    try:
        client = cluster.start_and_connect_sync()
        waiting = [
            client[engine].apply_async(join, rank, world, port)
            for rank, engine in enumerate(client.ids)
        ]
        for result in waiting:
            result.get(timeout=120)
        print("READY", time.time(), flush=True)
        client.close()
    finally:
        cluster.stop_cluster_sync()


main(int(sys.argv[1]), int(sys.argv[2]))
