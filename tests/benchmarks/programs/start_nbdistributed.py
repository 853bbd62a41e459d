"""A fresh process that starts nbdistributed's workers, which pass a barrier. Arguments: workers.

What its ``%dist_init`` does, without IPython around it. A message to a worker that is not
connected yet is dropped, so each is asked for its status until all have answered.
"""

import sys
import time

from nbdistributed.communication import CommunicationManager
from nbdistributed.process_manager import ProcessManager


def main(world: int) -> None:
    manager = ProcessManager()
    try:
        messages = CommunicationManager(world, manager.start_workers(world))
        deadline = time.monotonic() + 120
        while True:
            try:
                messages.send_to_all("get_status", {}, timeout=0.05)
                break
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
        answers = messages.send_to_all("execute", "dist.barrier()", timeout=60.0)
        for answer in answers.values():
            if answer["status"] != "success":
                raise RuntimeError(answer)
        print("READY", time.time(), flush=True)
    finally:
        manager.shutdown()


main(int(sys.argv[1]))
