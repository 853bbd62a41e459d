"""Ray's actors in a collective that one of them does not join.

Arguments: case, actors, a folder, a path.
"""

import os
import signal
import sys
from typing import Any

import ray
from hangs import LIMIT, PAUSE, WORK, Fault, cell, outcome, within_limit, works_again
from ray.exceptions import GetTimeoutError


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, rank: int, world: int, folder: str):
        import torch.distributed as dist

        address = f"file://{folder}-meeting"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        self.names: dict[str, Any] = {"rank": rank}

    def pid(self) -> int:
        return os.getpid()

    def execute(self, code: str) -> None:
        exec(code, self.names)


def main(case: str, count: int, folder: str, path: str) -> None:
    ray.init(
        num_cpus=count,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        object_store_memory=100 << 20,
    )
    actors = [Actor.remote(rank, count, folder) for rank in range(count)]
    pids = ray.get([actor.pid.remote() for actor in actors])

    def execute(code: str, limit: float) -> None:
        waiting = [actor.execute.remote(code) for actor in actors]
        try:
            ray.get(waiting, timeout=limit)
        except KeyboardInterrupt:
            for reference in waiting:
                ray.cancel(reference)

    fault = None
    if case == "stop":
        fault = Fault(lambda: os.kill(os.getpid(), signal.SIGINT))
    elif case == "kill":
        fault = Fault(lambda: os.kill(pids[1], signal.SIGKILL))
    ended = within_limit(lambda: execute(cell(case, path), PAUSE + LIMIT), GetTimeoutError)
    again = works_again(lambda: execute(WORK, LIMIT))
    outcome(case, fault, ended, path, again)
    ray.shutdown()


main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
