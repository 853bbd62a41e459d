"""The floor of fresh ranks: plain processes, forked from one that has torch, pass a gloo barrier.

Arguments: ranks. For each port in its standard input it prints the seconds from the first fork
until all are past their barrier.
"""

import os
import signal
import sys
import time
from contextlib import closing
from multiprocessing import Pipe, connection

import torch
import torch.distributed as dist

BARRIER_TIMEOUT_S = 100.0


def _rank(number: int, ranks: int, port: int, ready: connection.Connection) -> None:
    """Go where the session's ranks go: over the loopback interface, with one thread each."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks
    )
    dist.barrier()
    ready.send(time.monotonic())


def _measure(ranks: int, port: int) -> float:
    ready, its = Pipe(duplex=False)
    began = time.monotonic()
    pids = []
    try:
        for number in range(ranks):
            pid = os.fork()
            if pid == 0:
                _rank(number, ranks, port, its)
                signal.pause()  # until it is killed: rank 0 holds the store of the others
            pids.append(pid)
        with closing(ready):
            times = []
            for _ in pids:
                if not ready.poll(BARRIER_TIMEOUT_S):
                    raise TimeoutError("not all are past the barrier")
                times.append(ready.recv())
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        its.close()
    return max(times) - began


def main() -> None:
    for line in sys.stdin:
        print(_measure(int(sys.argv[1]), int(line)), flush=True)


main()
