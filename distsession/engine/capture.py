"""Everything that a rank puts out, in order and without loss.

Descriptors 1 and 2 are two log files, so prints, C libraries and subprocesses end up in the same
place and no writer ever blocks on us. One thread, the pump, sends what has been added to them.
The order between the two files, and between text and displays, is kept in a queue of marks: each
says how long both files were when something else happened (a display, a change of stream, text of
another process since the last write, the begin or end of a request). What finds no room on a full
disk goes into a mark itself, so a print never fails and is shown all the same.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distsession.engine.gate import Gate
from distsession.engine.listeners import RequestListener
from distsession.engine.log_file import DISK_FULL, LogFile
from distsession.engine.retained_output import RetainedOutput
from distsession.engine.whole_writes import is_held, whole
from distsession.protocol.messages import Display, OutputEnd, Request, Text

__all__ = ["Capture", "LogStream"]

log = logging.getLogger(__name__)

STREAMS = ("stdout", "stderr")
CHUNK_BYTES = 1 << 16
PUMP_INTERVAL_S = 0.05
"""Seconds between two looks at the files while output is expected."""
QUIET_INTERVAL_S = 0.2
"""The same while something runs that puts nothing out."""
QUIET_AFTER_S = 0.1
"""Seconds after which what runs is quiet."""
IDLE_INTERVAL_S = 0.5
"""The same at rest: what Python prints then is told at once, what C code and other processes write
is found so."""
REST_AFTER_S = 1.0
"""Seconds after which a rank that runs nothing, and puts nothing out, is at rest."""
CHECK_EVERY_BYTES = 1 << 20
"""Bytes of Python's own prints between two looks at how far they are ahead."""
MAX_AHEAD_BYTES = 32 << 20
"""Bytes by which Python's own prints may be ahead of what the kernel has taken."""
MAX_MARKS_AHEAD = 256
"""Displays by which a rank may be ahead of what the kernel has taken."""
DISK_IS_FULL = """
distsession: there is no space left on the disk of {} on {}, where the logs of the ranks are. What \
ranks print is still shown here, but the logs are no longer complete, and C code and subprocesses \
may fail to write. Free some space: nothing needs to be started again.
"""


class _Mark(NamedTuple):
    sizes: tuple[int, int]
    message: Any = None
    begin: int | None = None
    text: tuple[int, bytearray] | None = None  # a stream, and what its file has no room for
    first: int = 0  # the stream that was written to before what others may have written


class LogStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a rank: each write goes to the log file at once."""

    def __init__(self, capture: Capture, index: int):
        self._capture = capture
        self._index = index

    encoding = "utf-8"
    errors = "backslashreplace"

    @property
    def name(self) -> str:
        return f"<{STREAMS[self._index]}>"

    def fileno(self) -> int:
        return self._index + 1

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    @whole
    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._capture.write(self._index, text.encode("utf-8", "backslashreplace"))
        return len(text)

    @property
    def buffer(self) -> _LogBuffer:
        """For code that writes bytes, as to the buffer of an ordinary stdout."""
        return _LogBuffer(self._capture, self._index)


class _LogBuffer(io.RawIOBase):
    def __init__(self, capture: Capture, index: int):
        self._capture = capture
        self._index = index

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._index + 1

    @whole
    def write(self, data: Any) -> int:
        data = bytes(data)
        self._capture.write(self._index, data)
        return len(data)


class Capture(RequestListener):
    """The order of a rank's output, and the thread that sends it.

    Args:
        rank: The rank.
        paths: The two log files.
        limit: Bytes of each that are kept.
        send: Sends a message to the kernel. It may block for as long as the kernel is behind.
        on_wake: Called by the pump whenever it wakes; whether it is to be called often.
        acknowledged: The last request whose output nobody needs any more; None where a kernel that
            ends takes this rank with it.
        on_begin: Called with a request that begins, and how long both files are then.
    """

    def __init__(
        self,
        rank: int,
        paths: tuple[str, str],
        limit: int,
        send: Callable[[Any], None],
        on_wake: Callable[[], bool] = lambda: False,
        acknowledged: Callable[[], int] | None = None,
        on_begin: Callable[[int, tuple[int, int]], None] = lambda request, sizes: None,
    ):
        self._rank = rank
        self._on_begin = on_begin
        self._on_wake = on_wake
        self._send_now = send
        self._acknowledged = acknowledged
        self._is_attended = True
        self._owner_lock = threading.Lock()
        self._detached = 0
        """How often a kernel has gone."""
        self._resume: Callable[[], None] | None = None
        self.is_open_question: Callable[[Any], bool] = lambda message: True
        """Whether a question still waits for its answer."""
        self._folder = os.path.dirname(paths[0])
        self._files = [LogFile(path, limit) for path in paths]
        self._retained = RetainedOutput(rank, self._files, STREAMS)
        self._has_warned = False
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in paths]
        self._sent = [0, 0]
        self._told = [0, 0]  # less than what was sent, if that ended within a character
        self._marks: deque[_Mark] = deque()
        self._messages = 0
        self._last_stream = 0
        self._other_size = 0
        """Of the other stream's file at the last write; more is a subprocess's, or C's."""
        self._unchecked = 0
        self._write_lock = threading.Lock()
        self._pump_lock = threading.Lock()
        self._wake = Gate()
        self._is_at_rest = False
        self._is_watching = False
        """Who is called on waking wants that often."""
        self._last_put_out: tuple[int, ...] = ()
        self._busy_at = time.monotonic()
        self.running = 0
        """The request that runs; 0 for none."""
        self._request = 0  # as the pump sees it
        self._begun: tuple[tuple[int, int], int] = ((0, 0), 0)
        self._requests = 0
        """How many have begun."""
        self.has_output = False
        """Whether the last request put anything out; then an ``OutputEnd`` follows its answer."""
        self.streams = (LogStream(self, 0), LogStream(self, 1))
        self._thread = threading.Thread(target=self._pump, name="distsession-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def become_child(self) -> None:
        """In a forked process: what it writes is in the rank's logs; nothing here waits or sends.

        Another thread of the rank may have held a lock just then, and nobody here would release it.
        """
        self._write_lock = threading.Lock()
        self.write = _write_plainly  # type: ignore[method-assign]
        self.show = self._show_plainly  # type: ignore[method-assign]

    def _show_plainly(self, message: Any) -> None:
        """A display as text, for only the rank can send one."""
        text = message.data.get("text/plain") if isinstance(message, Display) else None
        if text:
            _write_plainly(0, f"{text}\n".encode("utf-8", "backslashreplace"))

    # --- called by user code ----------------------------------------------------------------------

    def write(self, index: int, data: bytes) -> None:
        with self._write_lock:
            other = self._files[1 - index].size
            if index != self._last_stream or other != self._other_size:
                self._marks.append(_Mark(self._sizes(), first=self._last_stream))
                self._last_stream, self._other_size = index, other
            rest, file = memoryview(data), self._files[index]
            try:
                while rest:
                    if file.is_full and not file.has_room(len(rest)):
                        break
                    rest = rest[os.write(index + 1, rest) :]
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                file.is_full = True
            if rest:
                self._append_text(index, bytes(rest))
                self._warn()
            self._unchecked += len(data)
        self._end_rest()
        if self._unchecked > CHECK_EVERY_BYTES:
            self._unchecked = 0
            self._wait_for_kernel()

    @whole
    def show(self, message: Any) -> None:
        """Send a display after all text that was written before it."""
        with self._write_lock:
            self._marks.append(_Mark(self._sizes(), message, first=self._last_stream))
            self._messages += 1
        self._wake.open()
        self._wait_for_kernel()

    def _append_text(self, index: int, data: bytes) -> None:
        """Send text that is not in its file after all that is."""
        sizes = self._sizes()
        last = self._marks[-1] if self._marks else None
        if last is not None and last.text is not None and last.sizes == sizes:
            stream, text = last.text
            if stream == index and len(text) < CHUNK_BYTES:
                text += data
                return
        text_of = (index, bytearray(data))
        self._marks.append(_Mark(sizes, text=text_of, first=self._last_stream))
        self._messages += 1
        self._unchecked = CHECK_EVERY_BYTES  # check soon: it is kept in memory until it is sent

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._append_text(1, DISK_IS_FULL.format(self._folder, socket.gethostname()).encode())

    def _wait_for_kernel(self) -> None:
        while self._is_attended and not is_held() and self._is_ahead():
            self._wake.open()
            time.sleep(0.005)

    def _is_ahead(self) -> bool:
        return len(self._marks) > MAX_MARKS_AHEAD or self._unsent() > MAX_AHEAD_BYTES

    def _unsent(self) -> int:
        sizes = self._sizes()
        return sizes[0] + sizes[1] - self._sent[0] - self._sent[1]

    def _sizes(self) -> tuple[int, int]:
        """Of the log files, which are there even if the user's code has closed descriptor 1."""
        return self._files[0].size, self._files[1].size

    # --- called around each request ---------------------------------------------------------------

    def begin_request(self, request: Request) -> None:
        """What is put out from here on belongs to this request."""
        sizes = self._sizes()
        self.running = request.id
        self._begun = (sizes, self._messages)
        self._requests += 1
        self._marks.append(_Mark(sizes, begin=request.id, first=self._last_stream))
        self._end_rest()
        self._on_begin(request.id, sizes)

    def end_request(self, request: Request) -> None:
        sizes = self._sizes()
        self.running = 0
        self.has_output = (sizes, self._messages) != self._begun
        if not self.has_output:
            self._marks.append(_Mark(sizes, begin=0, first=self._last_stream))
            return
        end = OutputEnd(self._rank, request.id)
        self._marks.append(_Mark(sizes, end, begin=0, first=self._last_stream))
        self._wake.open()

    def flush(self) -> None:
        """Send everything that there is, now and in this thread."""
        self._drain()

    # --- a kernel that goes, and one that comes: the control thread -------------------------------

    def detach(self) -> None:
        """Nobody is there to be told, or not yet."""
        with self._owner_lock:
            self._detached += 1
            self._resume = None  # what an earlier kernel has allowed does not count any more
            self._is_attended = False

    def resume(self, then: Callable[[], None]) -> None:
        """Tell another kernel all that none has acknowledged, and go on.

        Args:
            then: Called, by the pump, just before.
        """
        self._resume = then
        self._wake.open()

    def _send_retained(self) -> None:
        with self._pump_lock:
            with self._owner_lock:
                resume, self._resume = self._resume, None
                if resume is None:
                    return
                resume()
                detached = self._detached
            self._forget()
            for message in self._retained.messages(self.is_open_question):
                self._send_now(message)
            with self._owner_lock:
                self._is_attended = detached == self._detached

    def _forget(self) -> None:
        if self._acknowledged is not None:
            # What comes between requests is kept for as long as nobody is there.
            self._retained.forget(self._acknowledged(), background=self._is_attended)

    # --- the pump ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        while True:
            self._wake.wait(self._interval())
            self._wake.close()
            try:
                self._is_watching = self._on_wake()
                if self._resume is not None:
                    self._send_retained()
                self._drain()
                self._forget()
                for index in range(len(self._files)):
                    self._maintain(index)
            except Exception:  # the rank must go on, and say so where its agent keeps the log
                log.exception("output of rank %d could not be sent", self._rank)
                time.sleep(1.0)

    def _end_rest(self) -> None:
        """There is something for the pump to look at more often."""
        if self._is_at_rest:
            self._wake.open()

    def _interval(self) -> float:
        """Seconds until the pump looks again, if nobody wakes it."""
        # Who has short requests, one after the other, is not woken for each.
        put_out = (*self._sent, self._messages, self._requests, self._request)
        if self._is_watching or put_out != self._last_put_out:
            self._last_put_out, self._busy_at = put_out, time.monotonic()
        # First said, then looked at: who adds something after this look wakes the pump.
        rest_after = QUIET_AFTER_S if self._request else REST_AFTER_S
        self._is_at_rest = time.monotonic() - self._busy_at > rest_after
        self._is_at_rest = self._is_at_rest and not self._marks and not self._unsent()
        if not self._is_at_rest:
            return PUMP_INTERVAL_S
        return QUIET_INTERVAL_S if self._request else IDLE_INTERVAL_S

    def _drain(self) -> None:
        with self._pump_lock:
            while self._marks:
                mark = self._marks[0]
                self._send_text(mark.sizes, mark.first)
                if mark.text is None:
                    self._marks.popleft()
                else:
                    with self._write_lock:  # whose owner may be adding to it
                        self._marks.popleft()
                    self._send_decoded(*mark.text)
                    self._maintain(mark.text[0])
                if mark.message is not None:
                    self._send(mark.message)
                if mark.begin is not None:
                    self._request = mark.begin
            # A mark that is added from here on has sizes at least as large as these.
            self._send_text(self._sizes(), self._last_stream, stop=lambda: bool(self._marks))

    def _send_text(
        self, sizes: tuple[int, int], first: int, stop: Callable[[], bool] | None = None
    ) -> None:
        for index in (first, 1 - first):
            size = sizes[index]
            while self._sent[index] < size and not (stop and stop()):
                count = min(CHUNK_BYTES, size - self._sent[index])
                data = self._files[index].read(count, self._sent[index])
                if not data:
                    break  # the file was cut short by someone else
                end = self._sent[index] + len(data)
                if self._send_decoded(index, data, self._told[index], end):
                    self._told[index] = end
                self._sent[index] = end
                self._maintain(index)

    def _send_decoded(
        self, index: int, data: bytes | bytearray, begin: int = -1, end: int = -1
    ) -> bool:
        text = self._decoders[index].decode(data)
        if text:
            message = Text(self._rank, self._request, STREAMS[index], text, begin, end)
            if begin < 0:
                self._send(message)
            else:
                if self._acknowledged is not None:
                    self._retained.add_text(self._request, index, begin, end)
                self._deliver(message)
        return bool(text)

    def _send(self, message: Any) -> None:
        if self._acknowledged is not None:
            self._retained.add(message)
        self._deliver(message)

    def _deliver(self, message: Any) -> None:
        if self._is_attended:
            self._send_now(message)

    def _maintain(self, index: int) -> None:
        if not self._files[index].maintain(self._sent[index]):
            with self._write_lock:
                self._warn()


def _write_plainly(index: int, data: bytes) -> None:
    """Write to the log; on a full disk the text is lost."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(index + 1, view) :]
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


@contextlib.contextmanager
def redirected(out: Any, err: Any) -> Iterator[None]:
    """Let ``sys.stdout`` and ``sys.stderr`` be these for a while."""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
