"""A rank's sockets to the kernel that owns its session.

Of a session that is kept, the kernel may end and another may attach. The sockets then are closed
and others opened in their place, by the control thread, whatever the main thread does meanwhile.
What a kernel has sent to all ranks and not seen the answer of is not lost with it: requests that
wait here go on waiting, and an answer stays, with its payload, until a kernel has acknowledged it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from distsession.protocol import message_stream, shared_memory
from distsession.protocol.agent_messages import StartRanks
from distsession.protocol.board import Board
from distsession.protocol.message_stream import MessageStream, packed
from distsession.protocol.messages import (
    Addressed,
    MalformedMessage,
    Reply,
    Request,
    Shared,
    decode,
    encode,
)
from distsession.protocol.serialize import Frames
from distsession.protocol.shared_memory import Link, Segment
from distsession.protocol.sockets import send
from distsession.protocol.wire import memory_path, node_folder, socket_path

__all__ = ["KernelLink", "Received"]

log = logging.getLogger(__name__)

SEND_TIMEOUT_MS = 50
"""How long a message waits for a kernel that does not read, between two looks at whether there is
another one, or whether this process is to end."""
ARRIVAL_TIMEOUT_S = 0.05
"""How long a request may be on its way whose kernel has been replaced."""
COMMIT_PAUSE_S = 20e-6, 0.02
"""The shortest and the longest pause between two looks at whether a request counts."""


class Received(NamedTuple):
    """A request, and what came with it.

    Attributes:
        request: Which.
        payload: Its frames, or where they are.
        memory: The link that they are on, if they are in shared memory.
        ranks: Who else gets it; empty where nobody needs to know.
    """

    request: Request
    payload: Any
    memory: Link
    ranks: tuple[int, ...] = ()

    @property
    def addressed(self) -> Addressed:
        return Addressed(self.request, self.ranks)


@dataclass(frozen=True)
class _Answer:
    """An answer that nobody has acknowledged."""

    received: Received
    reply: Reply
    payload: Frames | Segment


class KernelLink:
    """Sends to the kernel, and receives requests; for several threads.

    Args:
        start: What the rank was started with.
        rank: Its number.
        board: Where the kernel says what it has sent and seen.
        wake: Called, from the control thread, when the requests come from another socket.
    """

    def __init__(self, start: StartRanks, rank: int, board: Board, wake: Callable[[], object]):
        self._folder = start.folder
        self._node = start.node
        self._board = board
        self._wake = wake
        self._is_kept = start.keep > 0
        self.name = f"{start.generation}.{rank}"
        self.is_leaving = False
        """This process ends: what the kernel does not take any more is dropped."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._silence = os.eventfd(0, os.EFD_CLOEXEC)
        """Is never readable."""
        self._arrived: deque[list[bytes]] = deque()
        """Messages of the kernel that nobody has looked at."""
        self._request_lock, self._reply_lock = threading.Lock(), threading.Lock()
        self._output_lock, self._answer_lock = threading.Lock(), threading.Lock()
        self._queued: deque[Received] = deque()
        self._uncommitted: Received | None = None
        """A request that has come here, and perhaps not been sent to all ranks yet."""
        self._running: Received | None = None
        self._answers: dict[int, _Answer] = {}
        self._takes_replies = self.takes_output = True
        self.epoch = start.epoch
        self._stream = self._connect_stream()
        self._memory = self._connect_memory(start.epoch)
        self._output = self._connect(zmq.PUSH, "output")
        self.control = self._connect(zmq.DEALER, "control")

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.SNDHWM, 32)
        socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self.name.encode())
        folder = node_folder(self._folder, self._node)
        socket.connect(f"ipc://{socket_path(folder, name, self.epoch)}")
        return socket

    def _connect_stream(self) -> MessageStream:
        """For requests and their answers."""
        folder = node_folder(self._folder, self._node)
        path = socket_path(folder, "requests", self.epoch)
        try:
            return message_stream.connect(path, self.name.encode())
        except OSError as error:  # which somebody else sees and acts on
            log.warning("the kernel is not reached: %s", error)
            return message_stream.ended()

    def _connect_memory(self, epoch: int) -> Link:
        return Link.connect(memory_path(self._folder, self._node, epoch), self.name)

    # --- requests, for the main thread ------------------------------------------------------------

    @property
    def descriptor(self) -> int:
        """Is readable when something has come from the kernel."""
        stream = self._stream
        descriptor = -1 if stream.is_over else stream.fileno()
        # The control thread may just close it, and then ends the wait.
        return self._silence if descriptor < 0 else descriptor

    @property
    def holds_request(self) -> bool:
        """A request has been taken in from the system already."""
        return bool(self._queued or self._arrived)

    def has_request(self) -> bool:
        """Whether one is here, or what may be one."""
        with self._request_lock:
            return bool(self._queued) or self._has_arrived()

    def poll_request(self, timeout_ms: int) -> bool:
        """Wait a moment for a request."""
        if self.has_request():
            return True
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(timeout_ms)) and self.has_request()

    def _has_arrived(self, timeout_s: float = 0.0) -> bool:
        """Whether a message of the kernel is here, now or within a time."""
        deadline = time.monotonic() + timeout_s
        while not self._arrived and not self._stream.is_over:
            self._arrived += self._stream.receive()
            if self._arrived or not timeout_s or not self._stream.wait(deadline - time.monotonic()):
                break
        return bool(self._arrived)

    def receive_request(self) -> Received | None:
        """The next request; None where what has come is none, or was taken back."""
        with self._request_lock:
            if self._queued:
                self._running = self._queued.popleft()
                return self._running
            if not self._has_arrived():  # what woke it was something else
                return None
            received = self._decode(self._arrived.popleft())
            if received is None or not (self._is_kept and self._must_wait(received)):
                self._running = received
                return received
            self._uncommitted = received
        return self._wait_committed(received)

    def _must_wait(self, received: Received) -> bool:
        return self._board.committed(self.epoch) < received.request.id

    def _wait_committed(self, received: Received) -> Received | None:
        """Wait until all ranks have been sent a request; None if its kernel ended before that."""
        pause, longest = COMMIT_PAUSE_S
        while True:
            with self._request_lock:
                if self._uncommitted is None:
                    return None
                if not self._must_wait(received):
                    self._running, self._uncommitted = received, None
                    return received
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _decode(self, frames: Sequence[Any]) -> Received | None:
        try:
            message, payload = decode(frames)
        except MalformedMessage as error:
            log.warning("dropped a malformed request: %s", error)
            return None
        if isinstance(message, Addressed):
            return Received(message.request, payload, self._memory, message.ranks)
        if isinstance(message, Request):
            return Received(message, payload, self._memory)
        log.warning("dropped a message that is no request: %r", message)
        return None

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, received: Received, reply: Reply, payload: Frames | Segment) -> None:
        """Send the end of a request; what is in shared memory is closed once nobody needs it."""
        with self._reply_lock:
            if self._is_kept:
                self._forget_acknowledged()
                self._answers[reply.id] = _Answer(received, reply, payload)
            self._running = None
            is_taken = self._takes_replies
        if is_taken:
            self._send_answer(reply, payload)
        if isinstance(payload, Segment) and not self._is_kept:
            payload.close()

    def _send_answer(self, reply: Reply, payload: Frames | Segment) -> None:
        with self._answer_lock:  # what is in shared memory is numbered in the order of messages
            epoch = self.epoch  # numbers of one kernel's link mean nothing to the next
            if isinstance(payload, Segment):
                try:
                    self.send(reply, self._memory.send(payload), epoch=epoch)
                    return
                except OSError as error:
                    log.warning("a result is sent through a socket: %s", error)
                    payload = shared_memory.map_private(payload.descriptor, payload.sizes)
            self.send(reply, payload, epoch=epoch)

    def _forget_acknowledged(self) -> None:
        if self._answers:
            seen = self._board.acknowledged(self.epoch)
            for number in [number for number in self._answers if number <= seen]:
                self._close(self._answers.pop(number))

    def forget_acknowledged(self) -> None:
        """Let go of answers that the kernel has seen; called now and then."""
        if self._answers and self._reply_lock.acquire(blocking=False):
            try:
                self._forget_acknowledged()
            finally:
                self._reply_lock.release()

    @staticmethod
    def _close(answer: _Answer) -> None:
        if isinstance(answer.payload, Segment):
            answer.payload.close()

    # --- other messages ---------------------------------------------------------------------------

    def send(
        self, message: Any, payload: Frames | Shared | None = None, *, epoch: int | None = None
    ) -> None:
        """Send something; where no kernel is there, nothing.

        Args:
            message: What.
            payload: What goes with it.
            epoch: The owner that it is for; left out, the present one.
        """
        whole = packed(encode(message, payload or ()))
        epoch = self.epoch if epoch is None else epoch
        is_posted = False
        while True:
            with self._reply_lock:
                if epoch != self.epoch or not self._takes_replies:
                    return
                try:
                    is_sent = self._stream.flush() if is_posted else self._stream.send(whole)
                except OSError:  # the kernel is gone
                    return
                if is_sent or (self.is_leaving and self._is_kept):
                    return
                is_posted = True
                self._stream.wait(SEND_TIMEOUT_MS / 1000)

    def send_output(self, message: Any) -> None:
        """Wait for as long as the kernel is behind; give up only when this process ends.

        Raises:
            zmq.Again: It ends.
        """
        frames = encode(message)
        epoch = self.epoch
        while True:
            with self._output_lock:
                if epoch != self.epoch or not self.takes_output:
                    return
                try:
                    send(self._output, frames)
                    return
                except zmq.Again:
                    if self.is_leaving:
                        raise

    # --- another kernel, for the control thread ---------------------------------------------------

    def detach(self) -> None:
        """Nobody is there: nothing is sent until somebody has attached."""
        self.takes_output = self._takes_replies = False

    def attach(self, epoch: int) -> None:
        """Connect to the sockets of another owner, and send it nothing yet."""
        self.detach()
        with self._request_lock:
            self._take_queued()
            with contextlib.suppress(OSError):
                self._memory = self._connect_memory(epoch)
            self.epoch = epoch  # after its link: nothing on the one before is told as its own
            with self._reply_lock:
                former, self._stream = self._stream, self._connect_stream()
                former.close()
        with self._output_lock:
            self._output.close(0)
            self._output = self._connect(zmq.PUSH, "output")
        self.control = self._connect(zmq.DEALER, "control")  # who uses the one before closes it
        self._takes_replies = True
        self._wake()

    def _take_queued(self) -> None:
        """Requests that wait in the socket, as far as all ranks were sent them."""
        received, self._uncommitted = self._uncommitted, None
        while True:
            if received is not None and not self._must_wait(received):
                self._queued.append(received)
            # What a kernel that is not gone has sent may still be on its way.
            if not self._has_arrived(ARRIVAL_TIMEOUT_S):
                return
            received = self._decode(self._arrived.popleft())

    def state(self) -> tuple[Addressed | None, tuple[Addressed, ...], tuple[Addressed, ...]]:
        """What runs, what waits, and what is answered and not acknowledged."""
        with self._request_lock, self._reply_lock:
            running = None if self._running is None else self._running.addressed
            queued = tuple(received.addressed for received in self._queued)
            return running, queued, tuple(a.received.addressed for a in self._answers.values())

    def resume(self, drop: Sequence[int]) -> None:
        """Send again what nobody has acknowledged, but for some requests; those do not begin."""
        with self._request_lock:
            kept = [each for each in self._queued if each.request.id not in drop]
            self._queued = deque(kept)
        with self._reply_lock:
            for number in [number for number in self._answers if number in drop]:
                self._close(self._answers.pop(number))
            answers = list(self._answers.values())
        for answer in answers:
            self._send_answer(answer.reply, answer.payload)
        self._wake()
