"""What a kernel and the agents of other hosts have to know of each other, and how they speak.

Both get CURVE keys that are made for one session. They are in a file that only its owner may read;
an agent gets the path of that file, or its text on the standard input. Messages are JSON, so that
nothing that comes over a network is ever unpickled here.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = [
    "ATTACH",
    "FAILS",
    "LISTENS",
    "MESSAGES",
    "MESSAGE_MAX",
    "PING_S",
    "SOCKETS",
    "STARTS",
    "STORE",
    "TCP_STORE",
    "TUNNEL",
    "LinkKeys",
    "decode",
    "encode",
    "reach_proof",
    "read_keys",
    "tcp_place",
    "tunnel_path",
    "write_keys",
]

STARTS = "distsession-host: starts"
LISTENS = "distsession-host: listens "
FAILS = "distsession-host: fails "
"""How lines begin that an agent prints before it has a link. What stands before the first of them
was printed by something else, such as a login shell."""

MESSAGE_MAX = 1 << 20
"""Bytes of the longest message."""

MESSAGES = "link"
"""Where relays connect for messages."""
SOCKETS = ("agent", MESSAGES, "relay")
"""The kernel's sockets to which a host connects: by their names in ``wire.socket_path``."""
STORE, TCP_STORE = "store", "tcp-store"
"""The session's own store, and torch's, which have no owner's number."""

ATTACH = "attach"
"""The way back: to the socket at which an agent takes in who wants to own the session."""

PING_S = 0.5
"""Seconds between two signs of life of the kernel."""


@dataclass(frozen=True, kw_only=True)
class LinkKeys:
    """What it takes to be let in.

    Attributes:
        addresses: Of the kernel's host, in the order in which they are tried.
        port: Where the kernel listens.
        kernel_public: The kernel's public key: an agent talks to nobody else.
        public: The agents' own key: the kernel talks to nobody else.
        reach_key: Proves to one agent that another is one of this session.
        stream_key: Opens streams to the kernel.
        tunnel: How the paths begin of sockets on each host that ssh carries to the kernel; empty
            where it carries none.
        patience_s: Seconds without a sign of the kernel after which an agent ends.
    """

    addresses: tuple[str, ...]
    port: int
    kernel_public: str
    public: str
    secret: str
    reach_key: str
    stream_key: str
    tunnel: str = ""
    patience_s: float = 15.0

    def __repr__(self) -> str:  # it is a secret: not for logs and tracebacks
        shown = replace(self, secret="...", reach_key="...", stream_key="...")
        return f"LinkKeys({', '.join(f'{k}={v!r}' for k, v in asdict(shown).items())})"


TUNNEL = "ssh"
"""Stands for the address of the kernel where ssh carries all that goes there."""


def tcp_place(address: str, port: int) -> str:
    """An address and a port for zmq and in URLs, where an IPv6 address stands in brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def tunnel_path(tunnel: str, host: str, what: str) -> str:
    """The path of a socket that ssh makes on a host.

    Args:
        tunnel: Of the session's keys.
        host: Its name, which may have any characters.
        what: ``"link"`` or ``"streams"``.
    """
    import hashlib  # only here, and not for `import distsession`

    return f"{tunnel}-{hashlib.sha256(host.encode()).hexdigest()[:8]}-{what}"


def write_keys(path: str, keys: LinkKeys) -> None:
    """Write the file of the keys, which must not be there yet and which only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(keys), file)


def read_keys(text: str) -> LinkKeys:
    """The keys, of the text of their file.

    Raises:
        ValueError: It is none, or that of another version of distsession.
    """
    try:
        found = json.loads(text)
        known = {field.name: found[field.name] for field in fields(LinkKeys)}
        known["addresses"] = tuple(map(str, known["addresses"]))
        return LinkKeys(**known)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        # Without what it has read, which may be a part of the keys.
        raise ValueError(f"these are no keys of a session ({type(error).__name__})") from None


def encode(kind: str, body: Mapping[str, Any] | None = None) -> bytes:
    """A message as it travels."""
    return json.dumps([kind, dict(body or {})]).encode()


def decode(data: bytes) -> tuple[str, dict[str, Any]]:
    """A message that came.

    Raises:
        ValueError: It is none.
    """
    with contextlib.suppress(UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        match json.loads(data):
            case [str(kind), dict(body)]:
                return kind, body
    raise ValueError(f"{len(data)} bytes are no message")


def reach_proof(reach_key: str, name: str, challenge: bytes) -> bytes:
    """What an agent answers to a challenge, to show that it is the one of this name."""
    import hashlib  # only here, and not for `import distsession`
    import hmac

    return hmac.digest(bytes.fromhex(reach_key), name.encode() + b"\0" + challenge, hashlib.sha256)
