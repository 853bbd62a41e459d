"""Peers that are not among our dependencies, in an environment of their own.

It sees the packages of ours (torch is not installed twice), but ours does not see it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.benchmarks.figures import NotInstalled

RESULTS = Path(__file__).with_name("results")
FOLDER = RESULTS / ".peers"
PYTHON = FOLDER / "bin" / "python"

PEERS = {
    "nbdistributed": ["--no-deps", "nbdistributed"],  # it names torch and all of jupyter
    "ray": ["ray"],
}
"""What pip is told for each."""

INSTALL_TIMEOUT = 900.0


def install() -> bool:
    """Make the environment and install what can be installed; says what cannot.

    Returns:
        Whether all of it is there.
    """
    everything = True
    RESULTS.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    scheme = {"base": str(FOLDER), "platbase": str(FOLDER)}
    Path(sysconfig.get_path("purelib", vars=scheme), "project.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )
    for name, arguments in PEERS.items():
        command = [str(PYTHON), "-m", "pip", "install", "-q", *arguments]
        try:
            done = subprocess.run(command, timeout=INSTALL_TIMEOUT).returncode == 0
        except subprocess.TimeoutExpired:
            done = False
        print(f"{name}: {'installed' if done else 'could not be installed'}", flush=True)
        everything = everything and done
    return everything


def python_with(name: str) -> str:
    """The interpreter that has a peer.

    Raises:
        NotInstalled: There is none.
    """
    command = ["-c", f"import importlib.util as u; raise SystemExit(not u.find_spec({name!r}))"]
    for python in (sys.executable, str(PYTHON)):
        if os.path.exists(python) and not subprocess.run([python, *command]).returncode:
            return python
    raise NotInstalled("not installed: python -m tests.benchmarks --install-peers")


def path_with(python: str) -> dict[str, str]:
    """An environment in which ``python`` is this interpreter."""
    return {"PATH": os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", "")])}


def ray_environment(python: str, folder: Path) -> dict[str, str]:
    """One in which Ray sends no statistics and writes below a folder."""
    home = {"HOME": str(folder), "TMPDIR": str(folder)}
    return {**path_with(python), **home, "RAY_USAGE_STATS_ENABLED": "0"}
