"""What a rank may have given to its device that nobody sees, as a word and in words."""

from __future__ import annotations

import enum

__all__ = ["Unseen", "texts"]


class Unseen(enum.IntFlag):
    """Kinds of it; of each only that there was some is known.

    Attributes:
        REPLAY: A captured graph was replayed and is not seen to be complete. Its operations are
            issued without Python, and may be of groups that are watched.
        GROUP: Code has made a backend of torch's by itself, whose operations pass no group of ours.
        SYMMETRIC_MEMORY: Symmetric memory is in use, through which kernels of ranks wait for one
            another.
        TORCHCOMMS: torch makes groups by torchcomms, whose communicators code may use directly.
    """

    REPLAY = 1
    GROUP = 2
    SYMMETRIC_MEMORY = 4
    TORCHCOMMS = 8


_TEXTS = {
    Unseen.REPLAY: "a replayed graph",
    Unseen.GROUP: "a backend that was made directly",
    Unseen.SYMMETRIC_MEMORY: "symmetric memory",
    Unseen.TORCHCOMMS: "torchcomms",
}


def texts(flags: int) -> tuple[str, ...]:
    """What these are called where no more is known."""
    if not flags:  # nearly always, and asked for every rank many times a second
        return ()
    return tuple(_TEXTS[kind] for kind in Unseen if kind & flags)
