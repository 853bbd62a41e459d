"""Unix sockets of one host that are reached from another, through encrypted streams.

On one host a :class:`UnixForwarder` listens on a unix socket and has a stream made for each
connection. On the other a :class:`StreamListener` takes the stream; whoever gets it from there
connects to the socket that is meant, and carries bytes both ways with :func:`pump`. Nothing that
comes is interpreted here, and descriptors are not carried.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from distsession.protocol import unix_socket
from distsession.protocol.secure_stream import (
    RECORD_MAX_BYTES,
    SECRET_BYTES,
    SecureStream,
    accept,
)
from distsession.protocol.waiting_room import RETRY_S, WaitingRoom, is_own_connection

__all__ = ["Forwarder", "StreamListener", "UnixForwarder", "UnixListener", "listen", "pump"]

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 20
"""What the system may hold of what was sent to a unix socket and not read."""
DRAIN_TIMEOUT_S = 2.0
"""Seconds that the other host has to take what a process has sent that is gone."""
HANDSHAKES_AT_ONCE = 64
"""So many handshakes go on at once at most. One more, and the oldest is given up, so that strangers
who are silent hold nobody up."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that threads have to end when what they carry has been closed."""
BACKLOG = 1024


def pump(stream: SecureStream, sock: socket.socket) -> None:
    """Carry bytes between a stream and a unix socket until both directions have ended.

    What ends on one side is ended on the other. What breaks on one side breaks the other at once,
    which is no error here; but what a process had sent that is gone still arrives.

    Args:
        stream: Is closed in the end.
        sock: Connected; is closed in the end.
    """
    try:
        _Pump(stream, sock).run()
    finally:
        stream.close()
        sock.close()


class _Pump:
    """Carries the bytes of one connection, each direction in a thread."""

    def __init__(self, stream: SecureStream, sock: socket.socket):
        self._stream, self._socket = stream, sock
        self._has_sent_all, self._has_received_all = threading.Event(), threading.Event()
        self._sender = threading.Thread(
            target=self._send, name="distsession-forward-send", daemon=True
        )

    def run(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._sender.start()
        try:
            self._receive()
        finally:
            self._break()
            self._sender.join()

    def _break(self) -> None:
        self._stream.abort()
        _break(self._socket)

    def _send(self) -> None:
        """From the socket to the stream, until no more comes."""
        buffer = memoryview(bytearray(RECORD_MAX_BYTES))
        try:
            while count := _read(self._socket, buffer):
                self._stream.send(buffer[:count])
            self._stream.end()
        except OSError as error:
            log.debug("a stream is broken: %s", error)
            self._break()
        self._has_sent_all.set()
        if self._has_received_all.is_set():
            self._stream.abort()  # nobody has to wait for it any longer

    def _receive(self) -> None:
        """From the stream to the socket, until both directions are over."""
        try:
            while piece := self._stream.receive():
                try:
                    self._socket.sendall(piece)
                except OSError:  # who was to have it is gone
                    self._finish()
                    return
        except OSError as error:
            log.debug("a stream is broken: %s", error)
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._has_received_all.set()
        if not self._has_sent_all.is_set():
            self._stream.wait_until_closed()  # by the other end, if it breaks before we are done

    def _finish(self) -> None:
        """Let arrive what was sent by a process that is gone."""
        with contextlib.suppress(OSError):
            while self._sender.is_alive() and self._stream.receive():
                pass
            self._sender.join()
            self._stream.drain(DRAIN_TIMEOUT_S)


def _read(sock: socket.socket, buffer: memoryview) -> int:
    """Bytes that have come; 0 at the end, also that of a process which has not read all."""
    try:
        return sock.recv_into(buffer)
    except ConnectionResetError:
        return 0


def _break(sock: socket.socket) -> None:
    """Break a connection, also for threads that wait in it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Listener:
    """Takes connections, serves each in a thread of its own, and can end all of them.

    Args:
        listener: Listens; is closed in the end.
        name: Of the threads.
    """

    def __init__(self, listener: socket.socket, name: str):
        self._listener, self._name = listener, name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._breakers: set[Callable[[], None]] = set()
        self._is_closed = False
        self._is_stopped = False
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self._acceptor.start()

    def _serve(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def stop_listening(self) -> None:
        """Take no more connections; those that there are go on. Harmless when repeated."""
        self._is_stopped = True
        _break(self._listener)  # wakes accept()

    def _may_enter(self, connection: socket.socket) -> bool:
        """Whether one who has come by TCP, and says something, is served at all."""
        return True

    def _note_drop(self) -> None:
        """One who has come by TCP is given up, or not served."""

    def _admit(self, connection: socket.socket) -> None:
        """Wait until there is room for one more."""

    def _dismiss(self, connection: socket.socket) -> None:
        """It takes no room any more. Harmless when repeated."""

    def close(self) -> None:
        """Break all connections, and listen no longer. Harmless when repeated."""
        self.stop_listening()
        with self._lock:
            self._is_closed = True
            breakers = list(self._breakers)
        for break_one in breakers:
            break_one()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._acceptor.join(CLOSE_TIMEOUT_S)
        with self._lock:
            threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()

    @contextlib.contextmanager
    def _breakable(self, break_it: Callable[[], None]) -> Iterator[None]:
        """Something that is to be broken when this is closed."""
        with self._lock:
            self._breakers.add(break_it)
            is_closed = self._is_closed
        if is_closed:
            break_it()
        try:
            yield
        finally:
            with self._lock:
                self._breakers.discard(break_it)

    def _accept(self) -> None:
        if self._listener.family != socket.AF_UNIX:
            room = WaitingRoom(self._listener, self.take, self._may_enter, self._note_drop)
            room.run(lambda: self._is_stopped)
            return
        while True:
            try:
                connection = unix_socket.accept(self._listener)
            except unix_socket.StrangerError as error:
                log.warning("no connection is taken: %s", error)
                continue
            except OSError as error:
                if self._is_stopped:
                    return
                log.warning("no connection can be taken: %s", error)
                time.sleep(RETRY_S)  # until a descriptor is free
                continue
            self.take(connection)

    def take(self, connection: socket.socket) -> None:
        """Serve a connection, also one that was made from here."""
        self._admit(connection)
        thread = threading.Thread(
            target=self._run, args=(connection,), name=self._name, daemon=True
        )
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for one more
            log.warning("no connection can be served: %s", error)
            self._forget(thread, connection)

    def _run(self, connection: socket.socket) -> None:
        try:
            with self._breakable(lambda: _break(connection)):
                self._serve(connection)
        except Exception:
            log.exception("a connection is given up")
        finally:
            self._forget(threading.current_thread(), connection)

    def _forget(self, thread: threading.Thread, connection: socket.socket) -> None:
        self._dismiss(connection)
        connection.close()
        with self._lock:
            self._threads.discard(thread)


class Forwarder(_Listener):
    """Carries each connection to a socket through a stream of its own.

    Args:
        listener: Listens on a unix socket, or at a port of the loopback interface, where only
            processes of this user are served; is closed in the end.
        open_stream: Makes a stream for a service; raises OSError if that cannot be had, and the
            connection is closed.
        service: Whose socket this is.
        carry: Does it, and closes both.
    """

    def __init__(
        self,
        listener: socket.socket,
        open_stream: Callable[[str], SecureStream],
        service: str,
        carry: Callable[[SecureStream, socket.socket], None] = pump,
    ):
        self._open_stream, self._service, self._carry = open_stream, service, carry
        super().__init__(listener, f"distsession-forward-{service}")

    def _may_enter(self, connection: socket.socket) -> bool:
        if is_own_connection(connection):
            return True
        log.warning("a process of another user is not served by %s", self._service)
        return False

    def _serve(self, connection: socket.socket) -> None:
        try:
            stream = self._open_stream(self._service)
        except OSError as error:
            log.warning("there is no stream for %s: %s", self._service, error)
            return
        with self._breakable(stream.abort):
            self._carry(stream, connection)


class UnixForwarder(Forwarder):
    """The same, of a unix socket that it makes.

    Args:
        path: Of the socket, which must not be there yet, in a folder that only its user can open.
        open_stream: As above.
        service: As above.
        carry: As above.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(
        self,
        path: str,
        open_stream: Callable[[str], SecureStream],
        service: str,
        carry: Callable[[SecureStream, socket.socket], None] = pump,
    ):
        self._path = path
        listener = unix_socket.listen(path, backlog=BACKLOG)
        super().__init__(listener, open_stream, service, carry)

    def stop_listening(self) -> None:
        if not self._is_stopped:  # later the path may be another one's
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        super().stop_listening()


class UnixListener(_Listener):
    """Listens on a unix socket, and hands over who connects.

    Args:
        path: Of the socket, in a folder that only its user can open.
        on_connection: Called with each connection, in a thread of its own. The connection is
            closed when it returns.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, path: str, on_connection: Callable[[socket.socket], None]):
        self._on_connection = on_connection
        super().__init__(unix_socket.listen(path, backlog=BACKLOG), "distsession-door")

    def _serve(self, connection: socket.socket) -> None:
        self._on_connection(connection)


def listen(bind: str = "") -> socket.socket:
    """Listen at a free TCP port.

    Args:
        bind: At which IPv4 address. Default: all, those of IPv6 as well.

    Raises:
        OSError: It cannot listen there.
    """
    if bind or not socket.has_dualstack_ipv6():
        return socket.create_server((bind, 0), backlog=BACKLOG)
    family = socket.AF_INET6
    return socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=True)


class StreamListener(_Listener):
    """Listens on TCP, and hands over the streams of those who have the secret.

    Args:
        secret: What both ends know, of 32 bytes.
        on_stream: Called with each stream and the hello of its other end, in a thread of its own.
            The stream is closed when it returns.
        bind: The address to listen at. Default: all.

    Attributes:
        port: Where it listens.
        dropped: Connections of those who did not show that they have the secret.

    Raises:
        OSError: It cannot listen there.
        ValueError: The secret is not as it should be.
    """

    def __init__(
        self,
        secret: bytes,
        on_stream: Callable[[SecureStream, dict[str, str]], None],
        bind: str = "",
    ):
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret of streams has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret, self._on_stream = secret, on_stream
        self._handshakes: dict[socket.socket, None] = {}
        """Those that go on, in the order in which they began."""
        self._room = threading.Semaphore(HANDSHAKES_AT_ONCE)
        self.dropped = 0
        listener = listen(bind)
        self.port = int(listener.getsockname()[1])
        super().__init__(listener, "distsession-streams")

    def _note_drop(self) -> None:
        with self._lock:
            self.dropped += 1

    def _admit(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._handshakes) >= HANDSHAKES_AT_ONCE:
                _break(next(iter(self._handshakes)))
        self._room.acquire()
        with self._lock:
            self._handshakes[connection] = None

    def _dismiss(self, connection: socket.socket) -> None:
        with self._lock:
            if connection not in self._handshakes:
                return
            del self._handshakes[connection]
        self._room.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            stream, hello = accept(connection, self._secret)
        except OSError as error:
            log.debug("dropped a connection: %s", error)
            self._note_drop()
            return
        self._dismiss(connection)
        with contextlib.closing(stream), self._breakable(stream.abort):
            self._on_stream(stream, hello)
