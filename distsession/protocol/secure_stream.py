"""An authenticated, encrypted stream of bytes between two hosts, over a connected socket.

Both ends know a secret of 32 bytes. Each sends a random number and an X25519 key that is made for
this stream; the keys of the two directions follow from what both can compute of these and from the
secret, so that what was recorded stays unreadable even for who learns the secret later. The first
record of each end shows that it has the keys. The accepting end shows it first, and the other says
nothing before that.

A record is a head, which says of which kind it is and how long, and what AES-256-GCM makes of its
bytes. Its number is the nonce: one that is altered, left out, sent again or in another place is
not taken for authentic, and breaks the stream. The end of a direction is a record, too, so a
stream that was cut is never taken for one that has ended.

What an end that has not shown the secret can have is a handshake of a fixed size, within a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "HELLO_MAX_BYTES",
    "RECORD_MAX_BYTES",
    "SECRET_BYTES",
    "SecureStream",
    "accept",
    "connect",
]

SECRET_BYTES = 32
RECORD_MAX_BYTES = 512 << 10
"""Bytes that a record carries at most: few enough to stay in a processor's cache on their way."""
HELLO_MAX_BYTES = 1 << 10
"""Of what the end that connects says of itself."""
HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that the other end has for all of its handshake."""
REKEY_RECORDS = 1 << 16
"""Records until the next key: long before AES-GCM has seen too much of the same one."""
KEEPALIVE_IDLE_S, KEEPALIVE_PAUSE_S, KEEPALIVE_PROBES = 15, 5, 4
"""When a silent connection is asked whether its other host is there, and how often until it is
not."""

WATCH_PAUSE_S = 1
"""The same, until it is there no more, of connections by which a host is watched."""
WATCH_PROBES = 34

_VERSION = 1
_CLIENT, _SERVER = b"DSESS-C", b"DSESS-S"  # unlike, so that nobody is sent back what was its own
_GREETING = struct.Struct("!7sB32s32s")  # role, version, random number, public key
_HEAD = struct.Struct("!BI")  # kind, bytes before encryption
_HELLO, _DATA, _END = 1, 2, 3
_TAG_BYTES = 16
_LAST_ACK = struct.Struct("=56xI")
"""Of Linux's tcp_info: milliseconds since the other end's system has acknowledged anything."""
_STATE = struct.Struct("!32sQ32sQ")  # of each direction, sending first: key, number
_FIRST_BUFFER_BYTES = 4 << 10
_BUFFER_BYTES = RECORD_MAX_BYTES + (64 << 10)
_LABEL = b"distsession stream 1: "

# Older releases, which some hosted notebooks have, copy once more.
_IN_PLACE: Final = hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into")


class SecureStream:
    """One end of a stream, made by :func:`connect` or :func:`accept`.

    One thread at a time may send, and another one receive. Any may abort or close.
    """

    def __init__(self, sock: socket.socket, reader: _Reader, sending: _Key, receiving: _Key):
        self._socket = sock
        self._reader = reader
        self._sending, self._receiving = sending, receiving
        self._out = memoryview(bytearray(_FIRST_BUFFER_BYTES))
        self._in = memoryview(bytearray(_FIRST_BUFFER_BYTES))
        self._is_over = False

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, at once.

        Raises:
            OSError: The stream is broken.
        """
        view = memoryview(data).cast("B")
        for at in range(0, len(view), RECORD_MAX_BYTES):
            self._send_record(_DATA, view[at : at + RECORD_MAX_BYTES])

    def receive(self) -> memoryview:
        """The next bytes, at least one, to be used before this is called again; none at the end.

        Raises:
            OSError: The stream is broken, was cut, or has brought what the other end did not send.
        """
        if self._is_over:
            return self._in[:0]
        kind, data = self._receive_record(RECORD_MAX_BYTES)
        if kind == _END and not data:
            self._is_over = True
        elif kind != _DATA or not data:
            raise ConnectionError("a record came on the stream that is not allowed there")
        return data

    def seal(self, data: memoryview) -> memoryview:
        """The record of some bytes, to be sent before the next one is made.

        For who sends by the socket itself, and does not wait in it.

        Args:
            data: Not more than ``RECORD_MAX_BYTES``.
        """
        return self._record(_DATA, data)

    def read_more(self) -> None:
        """Take in what has come by now, to see whether it :meth:`has_record`.

        Raises:
            BlockingIOError: Nothing has.
            OSError: The stream is broken.
        """
        self.has_record()  # makes room
        self._reader.read_more()

    def has_record(self) -> bool:
        """Whether :meth:`receive` would not have to wait."""
        if self._is_over:
            return False
        if not self._reader.has(_HEAD.size):
            return False
        _, length = _HEAD.unpack_from(self._reader.here)
        whole = _HEAD.size + length + _TAG_BYTES
        return length > RECORD_MAX_BYTES or self._reader.has(whole)

    def fileno(self) -> int:
        return self._socket.fileno()

    def suspended(self) -> bytes:
        """All that another process needs, with the socket, to go on in the place of this one.

        It holds the keys, so it is for nobody else. This process must not use the stream any more,
        except to look at its socket, to abort it and to close it.
        """
        keys = self._sending.key, self._sending.number, self._receiving.key, self._receiving.number
        return _STATE.pack(*keys) + bytes(self._reader.here)

    @classmethod
    def resumed(cls, sock: socket.socket, state: bytes) -> SecureStream:
        """Go on with a stream that another process had.

        Args:
            sock: Its socket, of which each process may have a descriptor of its own.
            state: What :meth:`suspended` has given there.

        Raises:
            ValueError: That is no state of a stream.
        """
        if len(state) < _STATE.size:
            raise ValueError(f"the state of a stream has {_STATE.size} bytes at least")
        out_key, out_number, in_key, in_number = _STATE.unpack_from(state)
        reader = _Reader(sock, None, state[_STATE.size :])
        return cls(sock, reader, _Key(out_key, out_number), _Key(in_key, in_number))

    def watch(self) -> None:
        """Have the system ask that of the other host each second whether it is there."""
        if self._socket.family != socket.AF_UNIX:
            _set_keepalive(self._socket, WATCH_PAUSE_S, WATCH_PAUSE_S, WATCH_PROBES)

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address and the port of the other end; None where that is not another host."""
        try:
            address, port, *_ = self._socket.getpeername()
        except (OSError, ValueError):  # it is closed; of a unix socket it is a path
            return None
        return address, port

    def unheard_s(self) -> float | None:
        """Seconds since the system of the other host has answered, whatever its processes do.

        None where that is not known, as on a connection that ssh carries.
        """
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
            return float(_LAST_ACK.unpack(info)[0]) / 1000
        except (OSError, struct.error):
            return None

    def end(self) -> None:
        """Say that no more is sent. What the other end sends can still be received.

        Raises:
            OSError: The stream is broken.
        """
        self._send_record(_END, memoryview(b""))

    def drain(self, timeout_s: float) -> None:
        """Read over what still comes, so that closing throws away nothing that was sent before.

        For who neither sends nor receives any more: a socket that is closed with something unread
        takes back what is still on its way.

        Args:
            timeout_s: Seconds until it is enough.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv_into(self._in):
                    return

    def wait_until_closed(self) -> None:
        """After the end of what comes, wait until the other end closes it, or this is aborted."""
        with contextlib.suppress(OSError):
            while self._socket.recv_into(self._in):
                pass

    def abort(self) -> None:
        """Break it, also for threads that wait in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break it, and let go of its socket. Harmless when repeated."""
        self.abort()
        self._socket.close()

    def _send_record(self, kind: int, data: memoryview) -> None:
        self._socket.sendall(self._record(kind, data))

    def _record(self, kind: int, data: memoryview) -> memoryview:
        size = _HEAD.size + len(data) + _TAG_BYTES
        if len(self._out) < size:
            self._out = memoryview(bytearray(_HEAD.size + RECORD_MAX_BYTES + _TAG_BYTES))
        record = self._out[:size]
        _HEAD.pack_into(record, 0, kind, len(data))
        self._sending.seal(record[: _HEAD.size], data, record[_HEAD.size :])
        return record

    def _receive_record(self, limit: int) -> tuple[int, memoryview]:
        head = bytes(self._reader.read(_HEAD.size))
        kind, length = _HEAD.unpack(head)
        if length > limit:
            raise ConnectionError("a record came on the stream that is longer than any can be")
        sealed = self._reader.read(length + _TAG_BYTES)
        if len(self._in) < length:
            self._in = memoryview(bytearray(RECORD_MAX_BYTES))
        data = self._in[:length]
        self._receiving.open(head, sealed, data)
        return kind, data


class _NotAuthentic(ConnectionError):
    """A record is not what the other end has sent in its place."""


class _Key:
    """The key of one direction, and the number of its next record."""

    def __init__(self, key: bytes, number: int = 0):
        self.key, self.number = key, number
        self._cipher = AESGCM(key)

    def seal(self, head: memoryview, data: memoryview, into: memoryview) -> None:
        nonce = self._next_nonce()
        if _IN_PLACE:
            self._cipher.encrypt_into(nonce, data, head, into)
        else:
            into[:] = self._cipher.encrypt(nonce, data, head)

    def open(self, head: bytes, sealed: memoryview, into: memoryview) -> None:
        nonce = self._next_nonce()
        try:
            if _IN_PLACE:
                self._cipher.decrypt_into(nonce, sealed, head, into)
            else:
                into[:] = self._cipher.decrypt(nonce, sealed, head)
        except InvalidTag:
            raise _NotAuthentic("what came on the stream is not authentic") from None

    def _next_nonce(self) -> bytes:
        if self.number and self.number % REKEY_RECORDS == 0:
            self.key = HKDFExpand(SHA256(), 32, _LABEL + b"next").derive(self.key)
            self._cipher = AESGCM(self.key)
        nonce = self.number.to_bytes(12, "big")
        self.number += 1
        return nonce


class _Reader:
    """Reads as much from a socket as there is, and hands it out in pieces.

    Attributes:
        deadline: Until when all must have come, by the monotonic clock; None for ever.
    """

    def __init__(self, sock: socket.socket, deadline: float | None, here: bytes = b""):
        self._socket = sock
        self._buffer = memoryview(bytearray(max(_FIRST_BUFFER_BYTES, len(here))))
        self._buffer[: len(here)] = here
        self._start, self._end = 0, len(here)
        self.deadline = deadline

    def read(self, count: int) -> memoryview:
        """As many bytes, to be used before this is called again."""
        while self._end - self._start < count:
            self._make_room(count)
            if self.deadline is not None:
                self._socket.settimeout(_left(self.deadline))
            got = self._socket.recv_into(self._buffer[self._end :])
            if not got:
                raise ConnectionError("the stream was cut before its end")
            self._end += got
        piece = self._buffer[self._start : self._start + count]
        self._start += count
        return piece

    @property
    def here(self) -> memoryview:
        """What has come and was not read."""
        return self._buffer[self._start : self._end]

    def has(self, count: int) -> bool:
        """Whether as many bytes have come; else there is room for them."""
        if self._end - self._start >= count:
            return True
        self._make_room(count)
        return False

    def read_more(self) -> None:
        """Take in what has come, without waiting, where there is room (see :meth:`has`).

        Raises:
            BlockingIOError: Nothing has.
            OSError: Nothing will.
        """
        got = self._socket.recv_into(self._buffer[self._end :], 0, socket.MSG_DONTWAIT)
        if not got:
            raise ConnectionError("the stream was cut before its end")
        self._end += got

    def _make_room(self, count: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        if len(self._buffer) - self._start >= count:
            return
        rest = self._buffer[self._start : self._end]
        if len(self._buffer) < count:
            self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._buffer[: len(rest)] = rest  # also where they overlap
        self._start, self._end = 0, len(rest)


def connect(
    sock: socket.socket,
    secret: bytes,
    hello: Mapping[str, str],
    *,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> SecureStream:
    """Make a stream of a connection to an end that accepts.

    Args:
        sock: Connected; belongs to the stream from now on, and is closed if this raises.
        secret: What both ends know, of 32 bytes.
        hello: What the other end is told first, such as the name of a service.
        timeout_s: Seconds that the other end has.

    Raises:
        OSError: It does not have the secret, is no distsession or another version of it, is gone,
            or needs longer than that.
        ValueError: The secret or the hello are not as they should be.
    """
    try:
        said = json.dumps(dict(hello)).encode("ascii")
        if len(said) > HELLO_MAX_BYTES:
            raise ValueError(f"a hello has {HELLO_MAX_BYTES} bytes at most, not {len(said)}")
        stream = _greet(sock, secret, is_client=True, timeout_s=timeout_s)
        _take_hello(stream)
        stream._send_record(_HELLO, memoryview(said))
        return _opened(stream)
    except BaseException:
        sock.close()
        raise


def accept(
    sock: socket.socket, secret: bytes, *, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[SecureStream, dict[str, str]]:
    """Make a stream of a connection that somebody has made, and hear what for.

    Args:
        sock: Connected; belongs to the stream from now on, and is closed if this raises.
        secret: What both ends know, of 32 bytes.
        timeout_s: Seconds that the other end has.

    Raises:
        OSError: It does not have the secret, is no distsession or another version of it, is gone,
            or needs longer than that.
        ValueError: The secret is not as it should be.
    """
    try:
        stream = _greet(sock, secret, is_client=False, timeout_s=timeout_s)
        stream._send_record(_HELLO, memoryview(b""))
        hello = _read_hello(bytes(_take_hello(stream)))
        return _opened(stream), hello
    except BaseException:
        sock.close()
        raise


def _greet(
    sock: socket.socket, secret: bytes, *, is_client: bool, timeout_s: float
) -> SecureStream:
    """Exchange greetings, and compute the keys."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret of a stream has {SECRET_BYTES} bytes, not {len(secret)}")
    deadline = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    _set_options(sock)
    reader = _Reader(sock, deadline)
    private = X25519PrivateKey.generate()
    own = _GREETING.pack(
        _CLIENT if is_client else _SERVER,
        _VERSION,
        os.urandom(32),
        private.public_key().public_bytes_raw(),
    )
    if is_client:
        sock.sendall(own)
    theirs = bytes(reader.read(_GREETING.size))
    role, version, _, public = _GREETING.unpack(theirs)
    if role != (_SERVER if is_client else _CLIENT):
        raise ConnectionError("the other end speaks something else")
    if version != _VERSION:
        raise ConnectionError("the other end has another version of distsession")
    if not is_client:
        sock.sendall(own)
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a key that gives the same with every other one
        raise ConnectionError("the other end's key is none") from None
    transcript = hashlib.sha256(own + theirs if is_client else theirs + own).digest()
    keys = HKDF(SHA256(), 64, transcript, _LABEL + b"keys").derive(shared + secret)
    from_client, from_server = _Key(keys[:32]), _Key(keys[32:])
    sending, receiving = (from_client, from_server) if is_client else (from_server, from_client)
    return SecureStream(sock, reader, sending, receiving)


def _take_hello(stream: SecureStream) -> memoryview:
    try:
        kind, data = stream._receive_record(HELLO_MAX_BYTES)
    except _NotAuthentic:
        raise ConnectionError("the other end does not have the secret of this session") from None
    if kind != _HELLO:
        raise ConnectionError("a record came on the stream that is not allowed there")
    return data


def _read_hello(said: bytes) -> dict[str, str]:
    with contextlib.suppress(UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        found = json.loads(said.decode("ascii"))
        if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()):
            return found
    raise ConnectionError("the other end does not say what the stream is for")


def _opened(stream: SecureStream) -> SecureStream:
    """From now on it may be silent for as long as it likes."""
    stream._reader.deadline = None
    stream._socket.settimeout(None)
    return stream


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Not TCP_USER_TIMEOUT: it ends connections to a process that is stopped and takes nothing.
    _set_keepalive(sock, KEEPALIVE_IDLE_S, KEEPALIVE_PAUSE_S, KEEPALIVE_PROBES)


def _set_keepalive(sock: socket.socket, idle_s: int, pause_s: int, probes: int) -> None:
    for option, value in (
        (socket.TCP_KEEPIDLE, idle_s),
        (socket.TCP_KEEPINTVL, pause_s),
        (socket.TCP_KEEPCNT, probes),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other end is not done with its handshake in time")
    return left
