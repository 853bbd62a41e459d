"""The private folder of a session.

Runs in: the kernel.
"""

from __future__ import annotations

import os
import tempfile

from distsession.errors import LaunchError

__all__ = ["private_folder"]

UNIX_PATH_MAX = 100
"""A unix socket's path has 107 bytes at most (sun_path in <sys/un.h>), less where we add a name."""


def private_folder() -> str:
    """A new folder that only this user can open, with a path short enough for unix sockets."""
    for base in (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR")):
        if not base or not os.access(base, os.W_OK | os.X_OK) or len(base) > UNIX_PATH_MAX - 40:
            continue
        try:
            folder = tempfile.mkdtemp(prefix="distsession-", dir=base)
        except OSError:
            continue
        os.mkdir(os.path.join(folder, "logs"), mode=0o700)
        return folder
    raise LaunchError(
        "there is no folder for the session's sockets and logs: neither "
        f"{tempfile.gettempdir()}, /tmp nor $XDG_RUNTIME_DIR can be written to (or its path is too "
        "long for a socket). Set TMPDIR to a short, writable path."
    )
