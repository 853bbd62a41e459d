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
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distsession.engine.process import die_with_parent
from distsession.protocol import unix_socket

__all__ = ["Op", "bind", "pack", "serve", "socket_path", "unpack"]

WORD = struct.Struct("<I")
OTHERS_S = 0.05
"""Seconds that those who have brought unlike values wait for the rest, to hear of them too."""
CHUNK_BYTES = 1 << 16
BACKLOG = 4096


class Op:
    """Operations, as the first byte of a request."""

    SET, GET, ADD, COMPARE_SET, CHECK, WAIT, DELETE, COUNT = range(1, 9)
    APPEND, KEYS, DELETE_EARLIER, PUSH, POP, LENGTH, COMPARE = range(9, 16)


OK, EMPTY, UNLIKE = 0, 1, 2


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
    fresh = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    listener = unix_socket.listen(fresh, backlog=BACKLOG)
    os.rename(fresh, path)  # nobody ever finds a path at which nobody listens
    return listener


@dataclass(eq=False)
class _Client:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    waits_for: tuple[int, list[bytes]] | None = None
    """A request that cannot be answered yet."""
    missing: set[bytes] = field(default_factory=set)
    """The keys that it still waits for."""
    compares: tuple[bytes, bytes] | None = None
    """What it compares with others that have not come yet, and by which name."""

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0


@dataclass(eq=False)
class _Comparison:
    """What those have brought who compare something, and who waits for the others."""

    count: int
    brought: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    waiting: list[_Client] = field(default_factory=list)
    answered: int = 0

    @property
    def is_alike(self) -> bool:
        return len({value for value, _ in self.brought.values()}) <= 1

    @property
    def have_all_come(self) -> bool:
        return len(self.brought) >= self.count


class _Server:
    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, set[_Client]] = {}
        self._comparisons: dict[bytes, _Comparison] = {}
        self._unlike: deque[tuple[float, bytes, _Comparison]] = deque()
        """Comparisons that wait for the rest, and until when."""
        self._greeting = pack(OK, [os.urandom(16)])
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self) -> None:
        while True:
            for key, events in self._selector.select(self._time_left()):
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
            while self._unlike and not self._time_left():
                _, name, found = self._unlike.popleft()
                if self._comparisons.get(name) is found and not found.is_alike:
                    self._answer_comparison(name, found)

    # --- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection = unix_socket.accept(self._listener)
        except OSError:  # it is gone, or a stranger
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
        self._stop_comparing(client)
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
            case Op.COMPARE:
                self._compare(client, *parts)
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
            case Op.DELETE_EARLIER:
                self._delete_earlier(*parts)
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

    def _delete_earlier(self, start: bytes, present: bytes) -> None:
        """Forget all keys that begin like this, with a lower number behind it.

        Higher ones stay: who deletes may be late, and others have gone on.
        """
        for table in (self._values, self._queues, self._comparisons):
            for key in [key for key in table if key.startswith(start)]:
                number = key[len(start) :].partition(b"/")[0]
                if number.isdigit() and int(number) < int(present):
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
            client.waits_for, client.missing = (code, keys), set(missing)
            for key in client.missing:
                self._waiting.setdefault(key, set()).add(client)
            return False
        self._answer(client, [self._values[key] for key in keys] if code == Op.GET else ())
        return True

    def _compare(
        self, client: _Client, key: bytes, name: bytes, count: bytes, value: bytes, says: bytes
    ) -> None:
        """Answer all who compare their values when all have come, or soon if values differ.

        Args:
            client: Who brings a value.
            key: What is compared.
            name: Of who brings it.
            count: How many bring one.
            value: Which has to be the same.
            says: What the others are told if it is not.
        """
        found = self._comparisons.setdefault(key, _Comparison(int(count)))
        found.brought[name] = value, says
        found.waiting.append(client)
        client.compares = key, name
        if found.have_all_come or found.answered:
            self._answer_comparison(key, found)
        elif not found.is_alike:
            self._unlike.append((time.monotonic() + OTHERS_S, key, found))

    def _time_left(self) -> float | None:
        """Seconds until somebody who compares is answered, whoever comes; None: nobody is."""
        return max(0.0, self._unlike[0][0] - time.monotonic()) if self._unlike else None

    def _answer_comparison(self, key: bytes, found: _Comparison) -> None:
        code = OK if found.is_alike else UNLIKE
        answer = [part for name, (_, says) in found.brought.items() for part in (name, says)]
        waiting, found.waiting = found.waiting, []
        found.answered += len(waiting)
        if found.answered >= found.count:
            del self._comparisons[key]
        for each in waiting:
            each.compares = None
            self._answer(each, answer if code == UNLIKE else (), code)

    def _stop_comparing(self, client: _Client) -> None:
        """Who does not wait for the others any more has not come."""
        if client.compares is None:
            return
        (key, name), client.compares = client.compares, None
        found = self._comparisons.get(key)
        if found is not None and client in found.waiting:
            found.waiting.remove(client)
            del found.brought[name]
            if not found.brought:
                del self._comparisons[key]

    def _on_arrival(self, key: bytes) -> None:
        for client in list(self._waiting.get(key, ())):
            assert client.waits_for is not None
            if len(client.missing) > 1:  # what many wait for is not looked through at each arrival
                client.missing.discard(key)
                self._forget_waiting(key, client)
                continue
            code, keys = client.waits_for
            self._stop_waiting(client)
            self._answer_or_wait(client, code, keys)

    def _stop_waiting(self, client: _Client) -> None:
        if client.waits_for is None:
            return
        for key in client.missing:
            self._forget_waiting(key, client)
        client.waits_for, client.missing = None, set()

    def _forget_waiting(self, key: bytes, client: _Client) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.discard(client)
            if not waiting:
                del self._waiting[key]


def serve(listener: socket.socket, agent: int) -> None:
    """Hold the store until the agent ends."""
    die_with_parent(agent)
    _Server(listener).run()
