"""The link between the kernel and the relay of another node, over which all messages cross.

One ``MessageStream`` for each node. Every message on it is some frames: its kind; for ranks, their
names; and what is forwarded, which a relay hands on as it is and never unpickles. So a request for
several ranks crosses once.

A rank that is stopped takes nothing, and must hold up nobody. So of the messages for one socket of
a rank, the kernel sends no more than a window and waits for the relay to say that some are taken.
What it holds back waits in the kernel. Output is sent by the same rule the other way round.

Each node has a board of its own. What changes there comes before any reply of its ranks, so that
whoever has a reply sees what its rank had done by then. What the kernel says to ranks on the board
comes after the requests that were sent before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BOARD",
    "CONTROL",
    "CREDIT",
    "FORGET",
    "HELLO",
    "OUTPUT",
    "OUTPUT_WINDOW",
    "REPLY",
    "REQUEST",
    "TAKEN",
    "WELCOME",
    "WINDOW",
    "WORDS",
    "join_names",
    "key_of",
    "node_of",
    "pack_count",
    "relay_name",
    "split_names",
    "unpack_count",
]

# Relay to kernel.
HELLO = b"H"
"""The relay's clock."""
REPLY = b"R"
"""What a rank has sent to the socket of replies."""
OUTPUT = b"O"
"""What a rank has sent to the socket of output."""
TAKEN = b"T"
"""A socket of a rank, and how many messages it has taken since that was last said."""
BOARD = b"B"
"""The node's clock, and what has changed in the regions of its ranks, see ``board_mirror``."""

# Kernel to relay.
WELCOME = b"W"
"""The hello has come, so messages do, too."""
REQUEST = b"Q"
"""For the request sockets of some ranks."""
CONTROL = b"C"
"""For the control sockets of some ranks."""
CREDIT = b"G"
"""How many more messages of output may be sent."""
WORDS = b"S"
"""Words to be written on the node's board: where each is, and what."""
FORGET = b"F"
"""These ranks are gone: what waits for them is dropped."""

WINDOW = 64
"""Messages for one socket of a rank that may be on their way."""
OUTPUT_WINDOW = 32
"""Messages of output of a node that may be on their way."""

_COUNT = struct.Struct("<Q")


def relay_name(node: int) -> bytes:
    """What the relay of a node calls itself."""
    return b"node %d" % node


def node_of(name: bytes) -> int:
    """Whose relay this is.

    Raises:
        ValueError: It is none.
    """
    word, _, number = name.partition(b" ")
    if word != b"node":
        raise ValueError(f"no name of a relay: {name[:20]!r}")
    return int(number)


def join_names(names: Iterable[bytes]) -> bytes:
    """The frame that names ranks."""
    return b" ".join(names)


def split_names(frame: bytes) -> list[bytes]:
    """The ranks that a frame names."""
    return frame.split()


def key_of(kind: bytes, name: bytes) -> bytes:
    """Stands for a socket of a rank."""
    return kind + name


def pack_count(count: int) -> bytes:
    """The frame of a number."""
    return _COUNT.pack(count)


def unpack_count(frame: Any) -> int:
    """The number in a frame.

    Raises:
        ValueError: There is none.
    """
    try:
        (count,) = _COUNT.unpack(frame)
    except struct.error as error:
        raise ValueError(f"no number: {error}") from None
    assert isinstance(count, int)
    return count
