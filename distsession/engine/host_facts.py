"""What an agent tells of its host.

It is found in a process of its own: to import torch takes seconds, and may end a process.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
from typing import Any

import distsession
from distsession.engine.process import die_with_parent
from distsession.protocol.host_facts import PACKAGES

__all__ = ["OwnName", "installed_facts", "main", "resolve"]


def main() -> None:
    """Print the facts on standard output, as JSON."""
    die_with_parent(int(sys.argv[1]))
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # what modules print while they are imported is not for the reader
        json.dump({**installed_facts(), **_torch_facts()}, output)


def installed_facts() -> dict[str, Any]:
    """Facts of a host as fields of ``HostFacts``, without its network's and torch's."""
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: _version(name) for name in PACKAGES},
        "cpus": len(os.sched_getaffinity(0)),
    }


def resolve(hostname: str) -> tuple[str, ...]:
    """The IPv4 addresses of a name, as this host sees it; those of IPv6 if it has no other."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(hostname, None, family, socket.SOCK_STREAM)
            return tuple(sorted({str(entry[4][0]) for entry in found}))
    return ()


class OwnName:
    """Looks up the name of this host, in a thread: where no name server answers that takes long."""

    def __init__(self) -> None:
        self._found: tuple[str, ...] | None = None
        self._thread = threading.Thread(
            target=self._look_up, name="distsession-own-name", daemon=True
        )
        self._thread.start()

    def _look_up(self) -> None:
        self._found = resolve(socket.gethostname())

    def facts(self, timeout_s: float) -> dict[str, Any]:
        """What is known of it within this time, as fields of ``HostFacts``."""
        self._thread.join(timeout_s)
        return {"resolves_to": self._found or (), "is_name_unanswered": self._found is None}


def _version(package: str) -> str | None:
    if package == "distsession":  # which may run from a checkout
        return distsession.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_facts() -> dict[str, Any]:
    try:
        from distsession.engine.host_info import host_info, torch_problem
    except Exception as error:  # a library of CUDA's that is missing, say
        return {"problem": f"torch cannot be imported: {type(error).__name__}: {error}"}
    found = host_info()
    return {
        "problem": torch_problem(),
        "torch": found.torch_version,
        "backends": [name for name, _ in found.backends],
        "nccl": ".".join(map(str, found.nccl)),
        "gpus": list(found.gpus),
    }
