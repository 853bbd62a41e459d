"""Engines of ipyparallel in a collective that one of them does not join.

Arguments: case, engines, a free port, a path.
"""

import os
import signal
import sys

import ipyparallel
from hangs import LIMIT, PAUSE, WORK, Fault, cell, outcome, within_limit, works_again
from IPython.core.interactiveshell import InteractiveShell


def join(rank: int, world: int, port: int) -> int:
    import os

    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    return os.getpid()


def main(case: str, world: int, port: int, path: str) -> None:
    shell = InteractiveShell.instance()
    cluster = ipyparallel.Cluster(n=world)
    try:
        client = cluster.start_and_connect_sync()
        waiting = []
        for rank, engine in enumerate(client.ids):
            client[engine].push({"rank": rank})
            waiting.append(client[engine].apply_async(join, rank, world, port))
        pids = [result.get(timeout=120) for result in waiting]
        view = client[:]
        view.activate()
        code = cell(case, path)
        fault = None
        if case == "stop":  # what a notebook's Stop does to %%px
            fault = Fault(lambda: os.kill(os.getpid(), signal.SIGINT))
            ended = within_limit(lambda: shell.run_cell_magic("px", "--block", code), TimeoutError)
        else:
            if case == "kill":
                fault = Fault(lambda: os.kill(pids[1], signal.SIGKILL))
            result = view.execute(code, block=False)
            ended = within_limit(lambda: result.get(timeout=PAUSE + LIMIT), TimeoutError)
        again = works_again(lambda: view.execute(WORK, block=False).get(timeout=LIMIT))
        outcome(case, fault, ended, path, again)
    finally:
        cluster.stop_cluster_sync()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
