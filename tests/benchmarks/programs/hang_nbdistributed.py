"""Workers of nbdistributed in a collective that one of them does not join.

Arguments: case, workers, a path. What its magics do, without IPython around them; these wait 30 s
for an answer, which is ``LIMIT`` here.
"""

import os
import signal
import sys
import threading
import time

from hangs import LIMIT, PAUSE, WORK, Fault, cell, outcome, within_limit, works_again
from nbdistributed.communication import CommunicationManager
from nbdistributed.process_manager import ProcessManager


def main(case: str, world: int, path: str) -> None:
    os.setpgid(0, 0)  # Jupyter interrupts the kernel's process group, and the workers are in it
    manager = ProcessManager()
    try:
        messages = CommunicationManager(world, manager.start_workers(world))
        _wait_for_all(messages)
        code = cell(case, path)
        fault = None
        if case == "stop":
            fault = Fault(lambda: os.killpg(0, signal.SIGINT))
        elif case == "kill":
            fault = Fault(manager.processes[1].kill)
        ended = within_limit(lambda: _execute(messages, code), TimeoutError)
        again = works_again(lambda: messages.send_to_all("execute", WORK, timeout=LIMIT))
        outcome(case, fault, ended, path, again)
    finally:
        manager.shutdown()


def _wait_for_all(messages: CommunicationManager) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            messages.send_to_all("get_status", {}, timeout=0.05)
            return
        except TimeoutError:
            if time.monotonic() > deadline:
                raise


def _execute(messages: CommunicationManager, code: str) -> None:
    """As ``%%distributed`` does: the request in a thread, looking for output in this one."""
    failed = []

    def execute() -> None:
        try:
            messages.send_to_all("execute", code, timeout=PAUSE + LIMIT)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=execute, daemon=True)
    thread.start()
    while thread.is_alive():
        time.sleep(0.1)
    if failed:
        raise failed[0]


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
