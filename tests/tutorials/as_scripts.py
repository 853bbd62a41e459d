"""Run programs one after another as torchrun's users do: FOLDER PROGRAM...

torch is imported once. Each program runs in a process of its own, forked from that, and meets the
other ranks at a port of its own. What it leaves as its ``result`` goes to a file of the folder, and
so does the error of one that fails.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path

import torch  # noqa: F401

LIMIT_S = 60
"""Of each program."""


def run(program: str, folder: Path, port: int) -> None:
    """Run it and write down its result; this process ends with it."""
    name = f"{Path(program).stem}-{os.environ['RANK']}"
    with (folder / f"{name}.txt").open("w") as said:
        try:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=said)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            os.environ["MASTER_PORT"] = str(port)
            sys.argv = [program]
            variables = runpy.run_path(program, run_name="__main__")
            part = folder / f"{name}.part"
            part.write_text(json.dumps(variables["result"]))
            part.rename(folder / f"{name}.json")
        except BaseException:
            traceback.print_exc(file=said)
    os._exit(0)  # torch's gloo may abort at Python's end


def port_of(number: int, folder: Path) -> int:
    """A free port for the program with this number, which rank 0 tells the others by a file."""
    told = folder / f"port-{number}"
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            part = told.with_suffix(".part")
            part.write_text(str(free.getsockname()[1]))
        part.rename(told)
    deadline = time.monotonic() + 2 * LIMIT_S
    while not told.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has told no port for program {number}")
        time.sleep(0.01)
    return int(told.read_text())


def main() -> None:
    folder = Path(sys.argv[1])
    for number, program in enumerate(sys.argv[2:]):
        port = port_of(number, folder)
        pid = os.fork()
        if not pid:
            run(program, folder, port)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
