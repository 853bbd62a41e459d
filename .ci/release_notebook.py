"""Execute a notebook with a kernel of another Python: ``python release_notebook.py PYTHON``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

CELLS = [
    "%load_ext distsession\nsession = %session start 2 --backend gloo",
    "%%distributed\nt = torch.ones(3) * (rank + 1)\ndist.all_reduce(t)\nprint('sum', t.tolist())",
    "session.run(lambda: rank + 20).sum()",
    "%%px\nprint('engine', rank)",
    "%session close",
]


def main(python: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder, "kernels", "release")
        kernel.mkdir(parents=True)
        command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": command, "display_name": "release", "language": "python"}
        Path(kernel, "kernel.json").write_text(json.dumps(spec))
        os.environ["JUPYTER_PATH"] = folder
        NotebookClient(notebook, timeout=120, kernel_name="release").execute()
    text = "\n".join(shown(output) for cell in notebook.cells for output in cell.outputs)
    print(text)
    for expected in ("sum [3.0, 3.0, 3.0]", "engine 1", "41"):
        assert expected in text, expected


def shown(output: nbformat.NotebookNode) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


if __name__ == "__main__":
    main(sys.argv[1])
