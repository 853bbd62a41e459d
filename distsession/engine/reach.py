"""Whether other hosts can be reached: a port to try, and trying those of the others."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import socket
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distsession.protocol.forward import listen
from distsession.protocol.host_link import reach_proof
from distsession.protocol.waiting_room import WaitingRoom

__all__ = ["ReachListener", "own_addresses", "try_address", "try_peers"]

CHALLENGE_BYTES, PROOF_BYTES = 16, 32
TRY_TIMEOUT_S = 5.0
"""Seconds until an address that does not answer counts as closed."""
ANSWERS_AT_ONCE, ANSWER_TIMEOUT_S = 16, 3.0
"""So many strangers at once hold up the others, and for so many seconds at most."""
ANSWERS_MAX = 1024
"""So many wait for that at most; a session has no more hosts."""
_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_SCOPE_GLOBAL = 0x00
_NOT_READY = 0x01 | 0x08 | 0x20 | 0x40
"""Flags of an address that is temporary, of one that another host has, of one that is to go, and of
one of which it is not known yet whether another host has it."""


def own_addresses() -> dict[str, str]:
    """The address of each interface that is up; the loopback's only if there is no other.

    It is the IPv4 address where it has one, and a global or a unique local one of IPv6 otherwise.
    """
    found: dict[str, str] = {}
    loopback: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            query = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                flags = struct.unpack("16xH", fcntl.ioctl(probe, _SIOCGIFFLAGS, query)[:18])[0]
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, query)[20:24])
                if flags & _IFF_UP:
                    (loopback if flags & _IFF_LOOPBACK else found)[name] = address
    more = {name: one for name, one in _ipv6_addresses().items() if name not in found}
    return {**found, **more} or loopback


def _ipv6_addresses() -> dict[str, str]:
    """Those that other hosts can reach, by the interface, if the system has IPv6."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            address, _, _, scope, flags, name = line.split()
            if int(scope, 16) == _SCOPE_GLOBAL and not int(flags, 16) & _NOT_READY:
                found.setdefault(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found


class ReachListener:
    """A port at which this host shows who it is, in a thread of its own.

    An address alone shows nothing: that of a bridge for containers is the same on every host. So
    whoever connects sends a challenge, and only the right host of this session has the answer.
    """

    def __init__(self, name: str, reach_key: str):
        self._name, self._key = name, reach_key
        self._socket = listen()
        self._pool = ThreadPoolExecutor(ANSWERS_AT_ONCE, thread_name_prefix="distsession-reach")
        self._room = threading.Semaphore(ANSWERS_MAX)
        self._is_closed = False
        threading.Thread(target=self._serve, name="distsession-reach", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def _serve(self) -> None:
        WaitingRoom(self._socket, self._let_in).run(lambda: self._is_closed)

    def _let_in(self, connection: socket.socket) -> None:
        if not self._room.acquire(blocking=False):  # more than this at once are no hosts
            connection.close()
            return
        try:
            self._pool.submit(self._answer, connection)
        except RuntimeError:  # closed since the connection was made
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_TIMEOUT_S)
                challenge = _receive(connection, CHALLENGE_BYTES)
                connection.sendall(reach_proof(self._key, self._name, challenge))
        finally:
            self._room.release()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def try_address(address: str, port: int, name: str, reach_key: str) -> str:
    """Why a host cannot be reached at an address; empty if it can."""
    try:
        with socket.create_connection((address, port), TRY_TIMEOUT_S) as connection:
            challenge = os.urandom(CHALLENGE_BYTES)
            connection.sendall(challenge)
            proof = _receive(connection, PROOF_BYTES)
    except TimeoutError:
        return f"no answer in {TRY_TIMEOUT_S:g} s: a firewall drops it, or it leads elsewhere"
    except OSError as error:
        return error.strerror or str(error)
    if hmac.compare_digest(proof, reach_proof(reach_key, name, challenge)):
        return ""
    return "something else answers there"


def try_peers(peers: Mapping[str, Mapping[str, Any]], reach_key: str) -> dict[str, dict[str, str]]:
    """Try every address of every other host, all at once.

    Args:
        peers: For each, its ``addresses`` and its ``port``.
        reach_key: The session's.
    """
    tries = [(name, address) for name, peer in peers.items() for address in peer["addresses"]]
    found: dict[str, dict[str, str]] = {name: {} for name in peers}
    with ThreadPoolExecutor(max(len(tries), 1)) as pool:
        answers = pool.map(
            lambda one: try_address(one[1], int(peers[one[0]]["port"]), one[0], reach_key), tries
        )
        for (name, address), why in zip(tries, answers, strict=True):
            found[name][address] = why
    return found


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("it was closed at once")
        data += part
    return data
