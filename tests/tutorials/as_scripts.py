"""Run programs one after another as torchrun's users do: FOLDER PROGRAM...

torch is imported once. Each program runs in a process of its own, forked from that, whose number of
restarts is its own: so torchrun's store has nothing there that an earlier program has written.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401

LIMIT_S = 60


def run(program: str, folder: str, number: int) -> None:
    """Run it and write down its result; this process ends with it."""
    status = 1
    try:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        sys.argv = [program]
        variables = runpy.run_path(program, run_name="__main__")
        name = f"{Path(program).stem}-{os.environ['RANK']}.json"
        (Path(folder) / name).write_text(json.dumps(variables["result"]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # torch's gloo may abort at Python's end


def main() -> None:
    folder, *programs = sys.argv[1:]
    failed = []
    for number, program in enumerate(programs):
        pid = os.fork()
        if not pid:
            run(program, folder, number)
        if os.waitpid(pid, 0)[1]:
            failed.append(program)
    if failed:
        sys.exit(f"these have failed: {failed}")


if __name__ == "__main__":
    main()
