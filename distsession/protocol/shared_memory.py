"""Payloads in memory that the processes of one host share.

A segment is memory without a name (memfd_create(2)). Its sender writes every byte once and hands
the descriptor over through a unix socket; each receiver maps it copy-on-write, so that what one
changes nobody else sees. The system frees it with the last descriptor or mapping, whoever was
killed before. Nobody else can open it, and the size of /dev/shm does not matter to it.

To have the system find new memory takes several times as long as to write to memory that is
there. So a sender keeps a segment for a second, and writes the next payload to it if nobody holds
it any more. Whether somebody does, a forked child of a receiver perhaps, the system knows: it
grants a lease for writing (fcntl(2), F_SETLEASE) only on what nobody else has opened or mapped.

To map it anew takes a receiver longer than to read it, too. So a receiver may keep it mapped when
it is done with it (``engine/mappings.py``). It says so in a page behind the payload, in which each
receiver has a byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distsession.errors import DOCTOR_REMEDY, SerializationError
from distsession.protocol import unix_socket
from distsession.protocol.large_pages import (
    LARGE_PAGE,
    FileMemory,
    are_given_when_asked,
    map_file,
)
from distsession.protocol.messages import Buffered, Shared
from distsession.protocol.tensor_memory import RemoteBytes, size_of

__all__ = [
    "KEEP",
    "KEPT",
    "THRESHOLD",
    "Handed",
    "Link",
    "LinkListener",
    "Pool",
    "Returns",
    "Segment",
    "aligned",
    "check_room",
    "length_of",
    "map_private",
    "map_shared",
    "nbytes",
    "offer",
    "offsets",
    "own_memory",
    "split",
]

log = logging.getLogger(__name__)

THRESHOLD = 64 << 10
"""Bytes of a payload from which it goes through a segment. Below, copying it into messages to four
ranks is faster than what a segment costs by itself, about 0.1 ms (``make bench``, row moving)."""

CHUNK = 16 << 20
"""Bytes that are written between two looks at whether to stop, where the system has to find memory
for them."""

COPIED = 256 << 20
"""The same where the memory is there. From about 100 MB in one piece on, the C library passes the
caches by, and takes little more than half of the time."""

HUGE = 8 << 20
"""Bytes from which memory is asked for in large pages: a third of the time of the first touch, and
at most one of them (2 MB) more than is needed."""

PROBED, SLOW_S = 4 << 20, 0.002
"""Bytes that tell whether large pages are at hand, and seconds of processor time from which on they
are not: small ones take 1.3 ms, and large ones a third of it, unless the system has to move others
out of their way, or to ask the host of a virtual machine for what it has given back to it."""

BOUNCE = 1 << 20
"""Bytes of the buffer through which new memory is filled from a socket: the system finds memory
faster for a write than for a first touch, by more than the second copy costs."""

ASK_MEMORY = 64 << 20
"""Bytes of a payload from which it is first asked whether there is room for it."""

KEEP, KEPT = 1.0, 4
"""Seconds for which a segment is kept to be written to again, and how many are kept at most."""

PATIENCE = 5.0
"""Seconds that the other end of a link may take to do its part."""

HELLO = 1.0
"""Seconds that one who has connected may take to say its name, for which all others wait."""

RETURNED = 1 << 20, 512 << 20
"""Bytes of a segment between which receivers may keep it mapped. More would be too much memory to
hold for what may never come, and below that it is not mapped anew, but copied."""

_ALIGN = 64
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, Linux 5.14
_HEAD = struct.Struct("<qq")
_has_warned = False

Progress = Callable[[int, int], None]
"""Is told how many bytes of how many have been written."""


def nbytes(frames: Sequence[Any]) -> int:
    """Bytes of some frames together."""
    return sum(map(size_of, frames))


def offsets(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each frame begins and ends; a tensor's memory has to be aligned."""
    at = 0
    for size in sizes:
        yield at, at + size
        at += aligned(size)


def aligned(size: int) -> int:
    """Bytes up to where the next frame may begin."""
    return -(-size // _ALIGN) * _ALIGN


def length_of(sizes: Sequence[int]) -> int:
    """Bytes from the first byte of some frames to the last."""
    return max((end for _, end in offsets(sizes)), default=0)


class Returns:
    """The last page of a segment, in which receivers say that they have done with it.

    Args:
        descriptor: Of the segment.
        size: Bytes of the whole segment.
    """

    _CLOSED, _IN_USE, _RETURNED = 1, 1, 2
    PLACES = mmap.PAGESIZE - 1
    """How many receivers can have a byte. The first byte of the page is the sender's."""

    def __init__(self, descriptor: int, size: int):
        self._page = memoryview(
            map_file(
                descriptor,
                mmap.PAGESIZE,
                mmap.MAP_SHARED,
                mmap.PROT_READ | mmap.PROT_WRITE,
                size - mmap.PAGESIZE,
            )
        )

    # --- the sender -------------------------------------------------------------------------------

    def lend(self, place: int) -> None:
        """The next receiver gets this place, the first has 1."""
        self._page[place] = self._IN_USE

    def are_all_back(self, count: int) -> bool:
        """Whether as many receivers all have returned it."""
        return bytes(self._page[1 : 1 + count]) == bytes([self._RETURNED]) * count

    def close(self) -> None:
        """Nothing is written to it any more."""
        self._page[0] = self._CLOSED

    # --- a receiver -------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether there is no use in keeping it."""
        return self._page[0] == self._CLOSED

    def give_back(self, place: int) -> None:
        """Nobody in this process reads it any more, and it has changed nothing in its own view."""
        self._page[place] = self._RETURNED


class Segment:
    """Memory that can be handed to other processes, as long as its descriptor is open.

    Args:
        sizes: Bytes of each of its frames.
        name: What ``/proc`` calls it.
        may_return: Receivers may keep it mapped and return it, if its size allows for that.
    """

    def __init__(
        self, sizes: Sequence[int], name: str = "distsession", *, may_return: bool = False
    ):
        self.sizes = tuple(sizes)
        self.capacity = size = length_of(sizes)
        may_return = may_return and RETURNED[0] <= self.capacity <= RETURNED[1]
        if may_return:
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
        self._returns: Returns | None = None
        self._lent = 0
        first = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(first, size)
            # A receiver could otherwise be killed by SIGBUS where the memory has become shorter.
            fcntl.fcntl(first, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            # A descriptor that was opened counts for leases; the one of memfd_create does not.
            self.descriptor = os.open(f"/proc/self/fd/{first}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(first)
        self._is_written = False
        self._may_be_large = self.capacity >= HUGE
        self._found = 0
        """Bytes up to which it lies in large pages, before it is written to."""
        self._spent = 0.0
        """Seconds of processor time that it took to find them."""
        self._memory: FileMemory | None = None
        if may_return:
            try:
                self._returns = Returns(self.descriptor, size)
            except BaseException:
                self.close()
                raise

    @property
    def is_free(self) -> bool:
        """Whether no receiver reads it any more.

        Either all have said so, or no process has it open or mapped but this one, through this
        descriptor.
        """
        if self._returns is not None and self._lent and self._returns.are_all_back(self._lent):
            return True
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def use_again(self, sizes: Sequence[int]) -> None:
        """It is free, and is to have frames of other sizes now."""
        self.sizes = tuple(sizes)
        self._lent = 0

    def lend(self) -> int:
        """The place at which the next receiver may return it; 0 where that is not asked for."""
        if self._returns is None:
            return 0
        self._lent += 1
        if self._lent > Returns.PLACES:  # of which nobody could say whether they are done
            self._returns = None
            return 0
        self._returns.lend(self._lent)
        return self._lent

    def find_memory(
        self, end: int | None = None, between: Callable[[], None] | None = None
    ) -> None:
        """Have the system find memory before it is written to, if it gives large pages.

        Receivers find these in a fifth of the time, too.

        Args:
            end: Up to which byte. Default: all of it.
            between: Is called now and then, and may raise.
        """
        end = self.capacity if end is None else end
        if self._is_written or not self._may_be_large or end <= self._found:
            return
        try:
            memory = FileMemory(self.descriptor, self.capacity, mmap.MAP_SHARED)
        except OSError:  # a limit of what may be mapped: it can be written all the same
            self._may_be_large = False
            return
        if are_given_when_asked():
            with contextlib.suppress(OSError):
                memory.advise(mmap.MADV_HUGEPAGE)
            self._memory, self._is_written = memory, True
            return
        while self._found < end and self._found + LARGE_PAGE <= self.capacity:
            began = time.thread_time()
            has_found = memory.collapse(self.descriptor, self._found)
            self._spent += time.thread_time() - began
            if has_found:
                self._found += LARGE_PAGE
            is_slow = self._spent > SLOW_S and self._found <= PROBED
            if is_slow or not has_found:
                self._may_be_large = False
                return
            if between is not None and self._found % CHUNK == 0:
                between()

    def write(self, frames: Sequence[Any], progress: Progress | None = None) -> None:
        """Write all frames."""
        total, done = nbytes(frames), 0
        tell = progress or (lambda _done, _total: None)
        for frame, (at, _) in zip(frames, offsets(self.sizes), strict=True):
            for rest in _pieces(frame):
                while rest:
                    part = rest[:COPIED]
                    self.find_memory(at + len(part), lambda: tell(done, total))  # noqa: B023
                    written = self._write(part, at)
                    rest, at, done = rest[written:], at + written, done + written
                    tell(done, total)
        self._is_written = True

    def _write(self, data: memoryview, at: int) -> int:
        """Write the first bytes of some; how many these are.

        The system finds memory faster for a write; memory that is there is faster mapped.
        """
        there = data if self._is_written else data[: max(0, self._found - at)]
        if not there:  # written so, what there is no memory for is an error, and mapped, a signal
            return os.pwrite(self.descriptor, data[:CHUNK], at)
        self._mapped()[at : at + len(there)] = there
        return len(there)

    def put(self, frame: Any, at: int) -> None:
        """Write a frame to some place, for who uses this memory again and again."""
        if data := memoryview(frame).cast("B"):
            self._mapped()[at : at + len(data)] = data

    def copy(self, at: int, sizes: Sequence[int]) -> list[memoryview]:
        """Frames that lie at some place, in memory of this process."""
        return _copy(self._mapped(), at, sizes)

    def _mapped(self) -> memoryview:
        if self._memory is None:
            self._memory = FileMemory(self.descriptor, self.capacity, mmap.MAP_SHARED)
            if self._is_written:
                # To find all pages in one go takes a third of what it takes one by one.
                with contextlib.suppress(OSError):  # an older Linux refuses it
                    self._memory.advise(_MADV_POPULATE_WRITE)
        return self._memory.view()

    def receive(self, at: int, count: int, read: Callable[[memoryview], None]) -> None:
        """Fill a part of it from elsewhere.

        Args:
            at: Where it begins.
            count: How many bytes.
            read: Reads that many bytes as the memory has that it is given.
        """
        self.find_memory(at + count)
        if self._is_written or at + count <= self._found:
            read(self._mapped()[at : at + count])
            return
        buffer = memoryview(bytearray(min(count, BOUNCE)))
        while count:
            part = buffer[: min(count, len(buffer))]
            read(part)
            while part:
                written = os.pwrite(self.descriptor, part, at)
                part, at, count = part[written:], at + written, count - written

    def set_written(self) -> None:
        """All of its memory is there now."""
        self._is_written = True

    def close(self) -> None:
        """Let go of it; who has mapped it keeps it."""
        self._memory = None
        if self._returns is not None:
            self._returns.close()
            self._returns = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(frame: Any) -> Iterator[memoryview]:
    """The bytes of a frame, in order."""
    if isinstance(frame, RemoteBytes):
        yield from frame.pieces()
    elif memoryview(frame).nbytes:
        yield memoryview(frame).cast("B")


class Pool:
    """Segments that were just sent, to be written to again once nobody holds them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[float, Segment]] = []
        self._timer: threading.Timer | None = None

    def take(self, sizes: Sequence[int]) -> Segment:
        """A segment of about the right size that is free, or a new one.

        Raises:
            OSError: There is no memory.
        """
        length = length_of(sizes)
        with self._lock:
            for entry in self._kept:
                segment = entry[1]
                if length <= segment.capacity <= 2 * length and segment.is_free:
                    self._kept.remove(entry)
                    segment.use_again(sizes)
                    return segment
        return Segment(sizes, may_return=True)

    def keep(self, segment: Segment) -> None:
        """Take a segment over whose receivers have all mapped it, to be closed soon."""
        with self._lock:
            self._kept.append((time.monotonic() + KEEP, segment))
            while len(self._kept) > KEPT:
                self._kept.pop(0)[1].close()
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is None and self._kept:
            delay = max(0.01, self._kept[0][0] - time.monotonic())
            self._timer = threading.Timer(delay, self._close_old)
            self._timer.daemon = True
            self._timer.start()

    def _close_old(self) -> None:
        with self._lock:
            self._timer = None
            while self._kept and self._kept[0][0] <= time.monotonic():
                self._kept.pop(0)[1].close()
            self._set_timer()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            for _, segment in self._kept:
                segment.close()
            self._kept.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


def offer(
    frames: Sequence[Any], progress: Progress | None = None, pool: Pool | None = None
) -> Segment | None:
    """A segment with these frames; None where they are better sent through a socket.

    Args:
        frames: What to write.
        progress: Is told how far it is.
        pool: Where there may be a segment already.

    Raises:
        SerializationError: They do not fit into the memory of this machine.
    """
    total = nbytes(frames)
    if total < THRESHOLD:
        return None
    check_room(total)
    sizes = [size_of(frame) for frame in frames]
    segment = None
    try:
        segment = Segment(sizes) if pool is None else pool.take(sizes)
        segment.write(frames, progress)
    except OSError as error:
        if segment is not None:
            segment.close()
        _warn(error)
        return None
    except BaseException:
        if segment is not None:
            segment.close()
        raise
    return segment


def check_room(total: int, verb: str = "sent", where: str = "this machine") -> None:
    """Refuse a payload for which there is no memory.

    Raises:
        SerializationError: Its message says what to do instead.
    """
    if total < ASK_MEMORY:
        return
    room = available_memory()
    if total > room:
        instead = "Send it in parts, or have each rank load or make its own."
        if verb != "sent":
            instead = "Bring it in parts, or from some of the ranks."
        raise SerializationError(
            f"{_size(total)} cannot be {verb}: only {_size(room)} of memory are free on "
            f"{where}. {instead}"
        )


def _warn(error: OSError) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        log.warning(
            "shared memory cannot be had (%s): tensors are sent through sockets, which is slower. "
            "%s",
            error,
            DOCTOR_REMEDY,
        )


def available_memory() -> int:
    """Bytes that can be taken before this machine, or its container, is out of memory."""
    room = sys.maxsize
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                room = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int(_read(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
        room = min(room, limit - used)
    return max(0, room)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def map_private(descriptor: int, sizes: Sequence[int]) -> list[memoryview]:
    """The frames of a segment, to read and to change, seen by this process alone."""
    # Opened anew, so that the sender can tell by a lease whether it is still mapped.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _map(own, sizes, mmap.MAP_PRIVATE)
    finally:
        os.close(own)


def map_shared(descriptor: int, sizes: Sequence[int]) -> list[memoryview]:
    """The frames of a segment; what is written to them all others see."""
    return _map(descriptor, sizes, mmap.MAP_SHARED)


def _map(descriptor: int, sizes: Sequence[int], flags: int) -> list[memoryview]:
    length = length_of(sizes)
    if not length:
        return split(memoryview(bytearray()), sizes)
    return split(FileMemory(descriptor, length, flags).view(), sizes)


def own_memory(sizes: Sequence[int]) -> memoryview:
    """New memory of this process alone, laid out as a segment of frames of these sizes.

    Raises:
        OSError: There is not as much.
    """
    length = length_of(sizes)
    if not length:
        return memoryview(bytearray())
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # it is only faster
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def split(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The frames that lie in some memory."""
    return [memory[begin:end] for begin, end in offsets(sizes)]


def _copy(memory: memoryview, at: int, sizes: Sequence[int]) -> list[memoryview]:
    # Memory of this size the process has at hand from the last time; none is filled with zeros.
    return split(memoryview(bytearray(memory[at : at + length_of(sizes)])), sizes)


class Handed(NamedTuple):
    """What a link has brought.

    Attributes:
        descriptor: Of a segment.
        place: Where in its ``Returns`` a receiver may say that it has done with it; 0 for nowhere.
    """

    descriptor: int
    place: int


class Link:
    """Carries descriptors to one process, each with a number by which a message refers to it.

    A receiver may skip numbers (of a message that was never sent, or is of no interest): the
    memory of those is let go. Numbers below zero are those of the sender's ``SharedBuffer``, which
    the receiver keeps until it gets another.
    """

    def __init__(self, connection: socket.socket, sender: str):
        connection.settimeout(PATIENCE)
        self._socket = connection
        self._sender = sender
        self._numbers = itertools.count(1)
        self._last = 0
        self._buffer: tuple[int, memoryview] = 0, memoryview(b"")
        """On the receiver's side."""
        self._buffer_sent = 0

    @classmethod
    def connect(cls, path: str, sender: str) -> Link:
        """Open the link of a rank to the kernel.

        Args:
            path: Where a :class:`LinkListener` listens.
            sender: Name of this process.
        """
        connection = unix_socket.connect(path, kind=socket.SOCK_SEQPACKET)
        try:
            connection.send(sender.encode())
        except BaseException:
            connection.close()
            raise
        return cls(connection, sender)

    def send(self, segment: Segment, number: int = 0) -> Shared:
        """Hand a segment over; gives what a message says of it.

        Args:
            segment: What.
            number: A higher one than any before, if not this link but somebody else counts.

        Raises:
            OSError: The other end is gone, or does not read.
        """
        number = number or next(self._numbers)
        head = _HEAD.pack(number, segment.lend())
        socket.send_fds(self._socket, [head], [segment.descriptor])
        return Shared(self._sender, number, segment.sizes)

    @contextlib.contextmanager
    def receive(self, shared: Shared) -> Iterator[Handed]:
        """What a message refers to; its descriptor is there while the context lasts.

        Raises:
            OSError: It has not come.
        """
        while self._last < shared.number:
            number, handed = self._take()
            try:
                if number == shared.number:
                    yield handed
                    return
            finally:
                os.close(handed.descriptor)
        raise ConnectionError("the link for shared memory has nothing of that number")

    def _take(self) -> tuple[int, Handed]:
        """The number, and what has come next; a buffer is mapped as it comes."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1)
        if not data or not descriptors:
            raise ConnectionError("the link for shared memory was closed")
        number, place = _HEAD.unpack(data)
        handed = Handed(descriptors[0], place)
        if number > 0:
            self._last = number
            return number, handed
        try:
            memory = map_file(descriptors[0], 0, mmap.MAP_SHARED, mmap.PROT_READ)
            self._buffer = -number, memoryview(memory)
        except BaseException:
            os.close(descriptors[0])
            raise
        return number, handed

    def send_buffer(self, segment: Segment, number: int) -> None:
        """Hand the sender's buffer over, if that has not been done.

        Args:
            segment: Its memory.
            number: How many buffers the sender has had.

        Raises:
            OSError: The other end is gone, or does not read.
        """
        if self._buffer_sent != number:
            socket.send_fds(self._socket, [_HEAD.pack(-number, 0)], [segment.descriptor])
            self._buffer_sent = number

    def copy(self, buffered: Buffered) -> list[memoryview]:
        """The frames of a payload in the sender's buffer, in memory of this process.

        Raises:
            OSError: The buffer has not come.
        """
        # A descriptor that comes before it is one of a message that is not wanted any more.
        while self._buffer[0] < buffered.number:
            os.close(self._take()[1].descriptor)
        number, memory = self._buffer
        if number != buffered.number:
            raise ConnectionError("the buffer for small payloads is another one by now")
        return _copy(memory, buffered.at, buffered.sizes)

    def discard(self, shared: Shared) -> None:
        """Let go of what a message refers to that nobody wants."""
        with contextlib.suppress(OSError), self.receive(shared):
            pass

    def close(self) -> None:
        self._socket.close()


class LinkListener:
    """The kernel's end of the links of all ranks.

    Args:
        path: Of a socket in a folder that only this user can open.
    """

    def __init__(self, path: str):
        self._listener = unix_socket.listen(path, kind=socket.SOCK_SEQPACKET, backlog=4096)
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()

    def link(self, sender: str, patience: float = PATIENCE) -> Link:
        """The link of a process that has connected, or does so within ``patience`` seconds.

        Raises:
            OSError: It has not.
        """
        deadline = time.monotonic() + patience
        with self._lock:
            while sender not in self._links:
                self._accept(max(0.01, deadline - time.monotonic()))
            return self._links[sender]

    def _accept(self, timeout: float) -> None:
        self._listener.settimeout(timeout)
        try:
            connection = unix_socket.accept(self._listener)
        except unix_socket.StrangerError as error:
            log.warning("no link is taken: %s", error)
            return
        connection.settimeout(HELLO)
        try:
            name = connection.recv(100).decode()
        except (OSError, UnicodeDecodeError) as error:
            log.warning("a link is given up: %s", error)
            connection.close()
        else:
            self._links[name] = Link(connection, name)

    def drop(self, sender: str) -> None:
        """A process is gone."""
        with self._lock:
            with contextlib.suppress(OSError):
                while sender not in self._links:  # it may have connected without being asked for
                    self._accept(0)
            link = self._links.pop(sender, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        for sender in list(self._links):
            self.drop(sender)
        self._listener.close()
