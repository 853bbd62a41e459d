"""The private folder of a session."""

from __future__ import annotations

import os
import tempfile

from distsession.errors import LaunchError
from distsession.protocol import folder_lock

__all__ = ["AttachedFolder", "PrivateFolder"]

UNIX_PATH_MAX = 100
"""A unix socket's path has 107 bytes at most (sun_path in <sys/un.h>), less where we add a name."""


class PrivateFolder:
    """A new folder that only this user can open, with a path short enough for unix sockets.

    Raises:
        LaunchError: There is no place for it.
    """

    def __init__(self) -> None:
        self.path, self._lock = _make()

    def sweep(self) -> None:
        """Remove what earlier sessions have left beside it whose processes were all killed."""
        folder_lock.sweep(os.path.dirname(self.path))

    def release(self) -> None:
        """Use it no longer: who uses it last removes it."""
        folder_lock.release(self._lock)

    def remove(self) -> None:
        """Remove it, if it is still there. All processes that use it have ended."""
        folder_lock.remove(self.path)
        folder_lock.release(self._lock)


class AttachedFolder(PrivateFolder):
    """The folder of a session that another process has started.

    Raises:
        FileNotFoundError: It is gone.
    """

    def __init__(self, path: str) -> None:
        self.path, self._lock = path, folder_lock.hold(path)


def _make() -> tuple[str, int]:
    for base in (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR")):
        if not base or not os.access(base, os.W_OK | os.X_OK) or len(base) > UNIX_PATH_MAX - 46:
            continue
        try:
            folder = tempfile.mkdtemp(prefix=folder_lock.PREFIX, dir=base)
        except OSError:
            continue
        try:
            lock = folder_lock.make(folder)
            os.mkdir(os.path.join(folder, "logs"), mode=0o700)
        except BaseException:
            folder_lock.remove(folder)
            raise
        return folder, lock
    raise LaunchError(
        "there is no folder for the session's sockets and logs: neither "
        f"{tempfile.gettempdir()}, /tmp nor $XDG_RUNTIME_DIR can be written to (or its path is too "
        "long for a socket). Set TMPDIR to a short, writable path."
    )
