"""A rank's hand on the rendezvous store.

torch's C++ calls a store that is written in Python. So the session's own is not reached by a port,
which every user of the machine could connect to, but by a unix socket in the private folder; a wait
for a key can be ended at any moment, and it can be named (see ``store_server`` for the other end).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distsession.engine.process import die_with_parent
from distsession.engine.store_server import EMPTY, UNLIKE, WORD, Op, pack, unpack
from distsession.engine.torch_errors import STORE_CLOSED, in_torchs_place, key_text
from distsession.errors import CollectiveError
from distsession.protocol import unix_socket

__all__ = ["Store", "StoreEndedError", "StorePart", "connect_tcp", "serve_tcp", "session_store"]

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""torch's own for a store."""
UNREPORTED_WAIT_S = 0.05
"""A key that comes within this time was not waited for: nothing is said of it."""
CONNECT_TIMEOUT_S = 5.0
"""How long a store that takes the place of one that has ended may need to come up."""
CONNECT_RETRY_S = 0.01
MOST_IDLE = 1
"""Connections that are kept for the next request. A wait for several keys, and each thread, has one
of its own, which nobody needs afterwards."""

ENDED = (
    "the session's rendezvous store has ended, and what was in it is lost. It is replaced by "
    f"itself, and the process group is connected anew before the next run. (torch: {STORE_CLOSED})"
)

_Value = str | bytes


class StoreEndedError(dist.DistNetworkError):
    """The store's process has ended, or another one has taken its place."""


class _Connection:
    """One connection to the server; used for one request at a time."""

    def __init__(self, path: str):
        self.socket = unix_socket.connect(path, timeout_s=CONNECT_TIMEOUT_S)
        try:
            self.server = self.receive(time.monotonic() + CONNECT_TIMEOUT_S)[1][0]
        except BaseException:
            self.socket.close()
            raise

    def send(self, frame: bytes) -> None:
        self.socket.settimeout(None)
        self.socket.sendall(frame)

    def receive(self, deadline: float | None) -> tuple[int, list[bytes]]:
        (size,) = WORD.unpack(self._read(WORD.size, deadline))
        return unpack(self._read(size, None))

    def is_readable(self, deadline: float | None) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        return bool(poll.poll(left))

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = b""
        while len(data) < size:
            if deadline is not None and not self.is_readable(deadline):
                raise TimeoutError
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionResetError
            data += more
        return data


def _no_error() -> BaseException | None:
    return None


@contextlib.contextmanager
def _no_record(_keys: Sequence[str], _is_limited: bool) -> Iterator[None]:
    yield


class _Addresses(threading.local):
    """Those of a group's members, while this thread connects it."""

    def __init__(self) -> None:
        self.count = 0
        self.limit = DEFAULT_TIMEOUT
        self.known: dict[str, bytes] = {}


class Store(dist.Store):
    """The store, as torch and user code see it.

    torch's C++ keeps no hold of the Python part of a store, so this object lives as long as its
    process; see :func:`session_store`.

    Args:
        path: Of the server's socket.
    """

    def __init__(self, path: str):
        super().__init__()
        self._path = path
        self._server: bytes | None = None
        self._idle: list[_Connection] = []
        self._waiting: set[_Connection] = set()
        self._addresses = _Addresses()
        self.abort_error: Callable[[], BaseException | None] = _no_error
        """Why no wait may go on; None while one may."""
        self.record_wait: Callable[[Sequence[str], bool], contextlib.AbstractContextManager[None]]
        self.record_wait = _no_record
        """Lets others see that there is a wait for some keys, and whether it has an end."""
        os.register_at_fork(after_in_child=self._become_child)

    # --- life -------------------------------------------------------------------------------------

    def renew(self) -> None:
        """A generation begins: it may be another server, and is the same one until it ends."""
        self._server = None
        self._close_idle()
        self.set_timeout(DEFAULT_TIMEOUT)

    def end_waits(self) -> int:
        """From any thread: whoever waits for a key comes back with an error; gives their number."""
        waiting = list(self._waiting)
        for connection in waiting:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        return len(waiting)

    @contextlib.contextmanager
    def addresses_together(self, count: int, limit: timedelta) -> Iterator[None]:
        """Within, this thread connects a group of so many members.

        gloo asks for their addresses one after the other, in two requests for each: with 64 ranks
        that is a third of the time in which they connect. So with the first all are brought.

        Args:
            count: How many members.
            limit: For how long it waits for their addresses, whatever gloo says.
        """
        self._addresses.count, self._addresses.limit = count, limit
        try:
            yield
        finally:
            self._addresses.count, self._addresses.known = 0, {}

    def _bring_addresses(self, key: str) -> bool:
        """Whether it is one of the members' addresses; all of them are here then."""
        addresses = self._addresses
        start, _, number = key.rpartition("/")
        if not number.isdigit() or int(number) >= addresses.count:
            return False
        if key not in addresses.known:
            keys = [f"{start}/{number}" for number in range(addresses.count)]
            limit = addresses.limit
            is_limited = limit != DEFAULT_TIMEOUT
            values = self._await(Op.GET, keys, limit, is_limited=is_limited, shown=[key])
            addresses.known.update(zip(keys, values, strict=True))
        return True

    def delete_earlier(self, start: str, present: int) -> None:
        """Delete all keys that begin like this, with a lower number behind it."""
        self._request(Op.DELETE_EARLIER, [start.encode(), b"%d" % present])

    @property
    def _limit(self) -> timedelta:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        return limit

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().socket.close()

    def _become_child(self) -> None:
        """In a forked child: the connections are those of the parent."""
        self._close_idle()
        for connection in self._waiting:
            connection.socket.close()
        self._waiting = set()
        self.abort_error, self.record_wait = _no_error, _no_record

    # --- requests ---------------------------------------------------------------------------------

    def _connection(self) -> _Connection:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                return self._idle.pop()
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                connection = _Connection(self._path)
                break
            except OSError as error:
                # Where a generation begins, another store may be about to come up.
                if self._server is not None or time.monotonic() > deadline or self.abort_error():
                    raise (self.abort_error() or StoreEndedError(ENDED)) from error
                time.sleep(CONNECT_RETRY_S)
        if self._server is None:
            self._server = connection.server
        if connection.server != self._server:
            connection.socket.close()
            raise StoreEndedError(ENDED)
        return connection

    @contextlib.contextmanager
    def _using(self) -> Iterator[_Connection]:
        """A connection that goes back only if its request has been answered."""
        connection = self._connection()
        try:
            yield connection
        except (BrokenPipeError, ConnectionResetError) as error:
            connection.socket.close()
            raise (self.abort_error() or StoreEndedError(ENDED)) from error
        except BaseException:
            connection.socket.close()
            raise
        self._idle.append(connection)
        while len(self._idle) > MOST_IDLE:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop(0).socket.close()

    def _request(self, code: int, parts: Sequence[bytes]) -> list[bytes]:
        with self._using() as connection:
            connection.send(pack(code, parts))
            return connection.receive(None)[1]

    def _await(
        self,
        code: int,
        keys: Sequence[str],
        limit: timedelta,
        *,
        is_limited: bool,
        shown: Sequence[str] = (),
    ) -> list[bytes]:
        """Ask for what may not be there yet; the keys may be shown by other names."""
        try:
            return self._await_answer(code, keys, limit, is_limited, shown)
        except TimeoutError:
            raise dist.DistStoreError(key_text(keys, limit.total_seconds())) from None
        except CollectiveError as error:  # torch would have waited on
            in_torchs_place(error, key_text(keys, limit.total_seconds()), dist.DistStoreError)
            raise

    def _await_answer(
        self,
        code: int,
        keys: Sequence[str],
        limit: timedelta,
        is_limited: bool,
        shown: Sequence[str],
    ) -> list[bytes]:
        deadline = time.monotonic() + limit.total_seconds()
        soon = time.monotonic() + UNREPORTED_WAIT_S
        with self._using() as connection:
            self._waiting.add(connection)
            try:
                connection.send(pack(code, [_bytes(key) for key in keys]))
                if not connection.is_readable(min(soon, deadline)) and soon < deadline:
                    if error := self.abort_error():
                        raise error
                    for key in keys if len(keys) > 1 and not shown else ():
                        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
                        self._await_answer(Op.WAIT, [key], left, is_limited, ())  # names it alone
                    with self.record_wait(shown or keys, is_limited):
                        return connection.receive(deadline)[1]
                return connection.receive(deadline)[1]
            finally:
                self._waiting.discard(connection)

    # --- what torch asks of a store ---------------------------------------------------------------

    def set(self, key: str, value: _Value) -> None:
        self._request(Op.SET, [_bytes(key), _bytes(value)])

    def get(self, key: str) -> bytes:
        known = self._addresses.known.get(key)
        return self.multi_get([key])[0] if known is None else known

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        limit = self._limit
        return self._await(Op.GET, keys, limit, is_limited=limit != DEFAULT_TIMEOUT)

    def multi_set(self, keys: Sequence[str], values: Sequence[_Value]) -> None:
        pairs = zip(keys, values, strict=True)
        self._request(Op.SET, [_bytes(part) for pair in pairs for part in pair])

    def add(self, key: str, value: int) -> int:
        return int(self._request(Op.ADD, [_bytes(key), b"%d" % value])[0])

    def compare_set(self, key: str, expected_value: _Value, desired_value: _Value) -> bytes:
        parts = [_bytes(key), _bytes(expected_value), _bytes(desired_value)]
        return self._request(Op.COMPARE_SET, parts)[0]

    def check(self, keys: Sequence[str]) -> bool:
        if all(key in self._addresses.known for key in keys):
            return True
        return self._request(Op.CHECK, [_bytes(key) for key in keys])[0] == b"1"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._limit if timeout is None else timeout
        if len(keys) == 1 and self._bring_addresses(keys[0]):
            return
        is_limited = limit != DEFAULT_TIMEOUT
        self._await(Op.WAIT, keys, limit, is_limited=is_limited)

    def meet(self, key: str, shown: str, count: int, limit: timedelta) -> None:
        """Wait until so many ranks have come; whoever gives up has not come.

        Args:
            key: Of this meeting.
            shown: How it is named to the user.
            count: How many ranks.
            limit: For how long. The session may end the wait before, if it is hopeless.
        """
        if self.add(f"{key}/arrived", 1) == count:
            self.set(f"{key}/all", "")
        try:
            self._await(Op.WAIT, [f"{key}/all"], limit, is_limited=False, shown=[shown])
        except BaseException:
            self.add(f"{key}/arrived", -1)
            raise

    def compare(
        self, key: str, rank: int, count: int, value: int, says: str, timeout: float | None
    ) -> dict[int, str]:
        """Wait until so many ranks have brought a value, or one has brought another one.

        Args:
            key: Of this comparison.
            rank: Which brings this value.
            count: How many ranks.
            value: Which has to be the same.
            says: What the others are told if it is not.
            timeout: Seconds for which to wait; None for ever.

        Returns:
            What all say that have come, if values differ; else nothing.

        Raises:
            TimeoutError: Others have not come.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = (key, str(rank), str(count), f"{value:x}", says)
        with self._using() as connection:
            self._waiting.add(connection)
            try:
                if error := self.abort_error():
                    raise error
                connection.send(pack(Op.COMPARE, [_bytes(part) for part in parts]))
                code, found = connection.receive(deadline)
            finally:
                self._waiting.discard(connection)
        if code != UNLIKE:
            return {}
        names, said = found[::2], found[1::2]
        return {int(name): text.decode() for name, text in zip(names, said, strict=True)}

    def delete_key(self, key: str) -> bool:
        return self._request(Op.DELETE, [_bytes(key)])[0] == b"1"

    def num_keys(self) -> int:
        return int(self._request(Op.COUNT, [])[0])

    def append(self, key: str, value: _Value) -> None:
        self._request(Op.APPEND, [_bytes(key), _bytes(value)])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        return self  # any number of threads may use it

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._request(Op.KEYS, [])]

    def queue_push(self, key: str, value: _Value) -> None:
        self._request(Op.PUSH, [_bytes(key), _bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if block:
            limit = self._limit
            return self._await(Op.POP, [key], limit, is_limited=limit != DEFAULT_TIMEOUT)[0]
        with self._using() as connection:
            connection.send(pack(Op.POP, [_bytes(key), b"now"]))
            code, parts = connection.receive(None)
        if code == EMPTY:
            kind = getattr(dist, "QueueEmptyError", RuntimeError)
            raise kind(f"queue is empty: {key}")
        return parts[0]

    def queue_len(self, key: str) -> int:
        return int(self._request(Op.LENGTH, [_bytes(key)])[0])

    # The names under which C++ looks for two of them (torch 2.13).
    deleteKey = delete_key
    getNumKeys = num_keys

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a store: each process has its own connection to it")


class StorePart(dist.PrefixStore):
    """A part of the store; what torch does not pass on to a store in Python goes there directly."""

    def __init__(self, prefix: str, store: Store):
        super().__init__(prefix, store)
        self._start = f"{prefix}/"
        self._store = store

    def list_keys(self) -> list[str]:
        start = self._start
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def queue_push(self, key: str, value: _Value) -> None:
        self._store.queue_push(self._start + key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._start + key, block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._start + key)


def _bytes(value: _Value) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)


_stores: dict[str, Store] = {}


def session_store(path: str) -> Store:
    """This process's hand on the store at a path, always the same one."""
    if path not in _stores:
        _stores[path] = Store(path)
    return _stores[path]


# --- torch's own, for scripts that meet by an address ---------------------------------------------


def serve_tcp(listener: socket.socket, agent: int) -> None:
    """Hold a store of torch's until the agent ends.

    torch's TCPStore binds every interface unless it is handed a socket that listens already; this
    one listens on the loopback interface alone.
    """
    die_with_parent(agent)
    port = listener.getsockname()[1]
    _store = dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while True:
        signal.pause()


def connect_tcp(port: int) -> dist.Store:
    """A client of that store."""
    return dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
