"""The process that holds the session's rendezvous store.

It listens on a unix socket in the session's private folder and answers this user alone. One thread
and one ``selectors`` loop do everything. A request for keys that are not there yet is answered when
they are; how long to wait for that is its client's business, which closes the connection.

Frames, both ways: a word with the number of bytes that follow, one byte (the operation, or whether
it worked), and parts, each with its length before it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distsession.engine.process import die_with_parent

__all__ = ["Op", "bind", "pack", "serve", "socket_path", "unpack"]

WORD = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # struct ucred of <sys/socket.h>: pid, uid, gid
CHUNK_BYTES = 1 << 16
BACKLOG = 4096


class Op:
    """Operations, as the first byte of a request."""

    SET, GET, ADD, COMPARE_SET, CHECK, WAIT, DELETE, COUNT = range(1, 9)
    APPEND, KEYS, DELETE_OTHERS, PUSH, POP, LENGTH = range(9, 15)


OK, EMPTY = 0, 1


def pack(code: int, parts: Sequence[bytes] = ()) -> bytes:
    """A frame."""
    body = b"".join([bytes([code]), *(WORD.pack(len(part)) + part for part in parts)])
    return WORD.pack(len(body)) + body


def unpack(body: bytes) -> tuple[int, list[bytes]]:
    """The code and the parts of a frame, without the word before it."""
    parts, at = [], 1
    while at < len(body):
        (size,) = WORD.unpack_from(body, at)
        at += WORD.size
        parts.append(body[at : at + size])
        at += size
    return body[0], parts


def socket_path(folder: str) -> str:
    """Where the store of a session listens, in its private folder."""
    return os.path.join(folder, "store.sock")


def bind(path: str) -> socket.socket:
    """Listen at a path, also where the socket of a store that has ended still lies."""
    listener = socket.socket(socket.AF_UNIX)
    fresh = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    listener.bind(fresh)
    listener.listen(BACKLOG)
    os.rename(fresh, path)  # nobody ever finds a path at which nobody listens
    return listener


@dataclass(eq=False)
class _Client:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    waits_for: tuple[int, list[bytes]] | None = None
    """A request that cannot be answered yet."""

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0


class _Server:
    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, set[_Client]] = {}
        self._greeting = pack(OK, [os.urandom(16)])
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.data is None:
                    self._accept()
                    continue
                if key.data.is_closed:  # as an answer to it failed, on the way to this event
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        self._flush(key.data)
                    if events & selectors.EVENT_READ:
                        self._receive(key.data)
                except (OSError, ValueError, IndexError, struct.error):
                    self._close(key.data)

    # --- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(options)[1] not in (0, os.geteuid()):
            connection.close()
            return
        connection.setblocking(False)
        client = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, client)
        try:
            self._send(client, self._greeting)
        except OSError:  # it has left again
            self._close(client)

    def _close(self, client: _Client) -> None:
        if client.is_closed:
            return
        self._stop_waiting(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _receive(self, client: _Client) -> None:
        data = client.socket.recv(CHUNK_BYTES)
        if not data:
            self._close(client)
            return
        received = client.received
        received += data
        while len(received) >= WORD.size:
            (size,) = WORD.unpack_from(received)
            end = WORD.size + size
            if len(received) < end:
                return
            code, parts = unpack(bytes(received[WORD.size : end]))
            del received[:end]
            self._handle(client, code, parts)
            if client.is_closed:
                return

    def _answer(self, client: _Client, parts: Sequence[bytes] = (), code: int = OK) -> None:
        try:
            self._send(client, pack(code, parts))
        except OSError:  # it has ended
            self._close(client)

    def _send(self, client: _Client, frame: bytes) -> None:
        client.to_send += frame
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            sent = client.socket.send(client.to_send)
        except BlockingIOError:
            sent = 0
        del client.to_send[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, client)

    # --- requests ---------------------------------------------------------------------------------

    def _handle(self, client: _Client, code: int, parts: list[bytes]) -> None:
        values = self._values
        answer: list[bytes] = []
        match code:
            case Op.SET:
                for key, value in zip(parts[::2], parts[1::2], strict=True):
                    self._set(key, value)
            case Op.GET | Op.WAIT | Op.POP:
                self._answer_or_wait(client, code, parts)
                return
            case Op.ADD:
                answer = [b"%d" % (int(values.get(parts[0], b"0")) + int(parts[1]))]
                self._set(parts[0], answer[0])
            case Op.COMPARE_SET:
                key, expected, desired = parts
                present = values.get(key)
                if present == expected or (present is None and not expected):
                    self._set(key, desired)
                answer = [values.get(key, expected)]
            case Op.CHECK:
                answer = [b"%d" % all(map(self._is_here, parts))]
            case Op.DELETE:
                was_here = values.pop(parts[0], None) is not None
                answer = [b"%d" % (bool(self._queues.pop(parts[0], None)) or was_here)]
            case Op.COUNT:
                answer = [b"%d" % len(values)]
            case Op.APPEND:
                self._set(parts[0], values.get(parts[0], b"") + parts[1])
            case Op.KEYS:
                answer = list(values)
            case Op.DELETE_OTHERS:
                self._delete_others(*parts)
            case Op.PUSH:
                self._queues.setdefault(parts[0], deque()).append(parts[1])
                self._on_arrival(parts[0])
            case Op.LENGTH:
                answer = [b"%d" % len(self._queues.get(parts[0], ()))]
            case _:
                raise ValueError(f"no operation {code}")
        self._answer(client, answer)

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self._on_arrival(key)

    def _is_here(self, key: bytes) -> bool:
        return key in self._values or bool(self._queues.get(key))

    def _delete_others(self, start: bytes, present: bytes) -> None:
        """Forget all keys that begin like the present ones, but are not of them."""
        for table in (self._values, self._queues):
            for key in [k for k in table if k.startswith(start) and not k.startswith(present)]:
                del table[key]

    # --- waiting ----------------------------------------------------------------------------------

    def _answer_or_wait(self, client: _Client, code: int, keys: list[bytes]) -> bool:
        """Answer a request for keys, or keep it until they are here."""
        if code == Op.POP and not self._queues.get(keys[0]):
            if len(keys) > 1:  # it does not want to wait
                self._answer(client, code=EMPTY)
                return True
            missing: Iterable[bytes] = keys[:1]
        elif code == Op.POP:
            self._answer(client, [self._queues[keys[0]].popleft()])
            return True
        else:
            table = self._values.__contains__ if code == Op.GET else self._is_here
            missing = [key for key in keys if not table(key)]
        if missing:
            client.waits_for = code, keys
            for key in missing:
                self._waiting.setdefault(key, set()).add(client)
            return False
        self._answer(client, [self._values[key] for key in keys] if code == Op.GET else ())
        return True

    def _on_arrival(self, key: bytes) -> None:
        for client in list(self._waiting.get(key, ())):
            assert client.waits_for is not None
            code, keys = client.waits_for
            self._stop_waiting(client)
            self._answer_or_wait(client, code, keys)

    def _stop_waiting(self, client: _Client) -> None:
        if client.waits_for is None:
            return
        for key in client.waits_for[1]:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(client)
                if not waiting:
                    del self._waiting[key]
        client.waits_for = None


def serve(listener: socket.socket, agent: int) -> None:
    """Hold the store until the agent ends."""
    die_with_parent(agent)
    _Server(listener).run()
