"""The private folder of a session."""

from __future__ import annotations

import os

from distsession.errors import LaunchError
from distsession.protocol import folder_lock, places

__all__ = ["AttachedFolder", "PrivateFolder"]


class PrivateFolder:
    """A new folder that only this user can open, with a path short enough for unix sockets.

    Raises:
        LaunchError: There is no place for it.
    """

    def __init__(self) -> None:
        try:
            self.path, self._lock = places.make_folder()
        except places.NoPlaceError as error:
            raise LaunchError(str(error)) from None

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
