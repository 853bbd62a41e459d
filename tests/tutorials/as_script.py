"""Run a program as torchrun's users do, and write down its ``result``: PROGRAM FOLDER."""

from __future__ import annotations

import json
import os
import runpy
import sys

program, folder = sys.argv[1:]
sys.argv = [program]
variables = runpy.run_path(program, run_name="__main__")
with open(os.path.join(folder, f"{os.environ['RANK']}.json"), "w") as file:
    json.dump(variables["result"], file)
sys.stdout.flush()
os._exit(0)  # torch's gloo may abort at Python's end
