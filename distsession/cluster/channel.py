"""Our own road to the ranks: zmq, one hop, over unix sockets in a folder of the session.

Runs in: the kernel.

Requests leave from whichever thread makes them, straight on the socket; one thread receives
everything. The folder can be opened by its user alone, which is the authentication of all of it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

import zmq

from distsession import segment
from distsession.cluster.base import NOBODY, Budget, Channel, Payload, Pending
from distsession.errors import EngineDiedError, SessionStateError
from distsession.messages import (
    AskInput,
    AskStack,
    InputReply,
    LookReply,
    MalformedMessage,
    OutputEnd,
    Reply,
    Request,
    Shared,
    StackReply,
    decode,
    encode,
)
from distsession.segment import LinkListener, Segment

__all__ = ["SocketChannel"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
"""Seconds that a rank which is ready may take to connect its request socket."""


class SocketChannel(Channel):
    """The sockets of one session.

    Args:
        folder: An existing folder that only this user can open.
        on_event: Called by the channel's thread with every message that is no part of a run:
            readiness, failures and ends of ranks and agents. ``None`` says that the agent's link
            has closed. It must not block.
        background: Takes output that belongs to no run.
    """

    def __init__(
        self,
        folder: str,
        on_event: Callable[[Any], None],
        background: Pending,
    ):
        self._folder = folder
        self._on_event = on_event
        self.budget = Budget()
        self._background = background
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = self._bind(zmq.ROUTER, "requests")
        self._replies = self._bind(zmq.PULL, "replies")
        self._output = self._bind(zmq.PULL, "output")
        self._control = self._bind(zmq.ROUTER, "control")
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._dead: dict[int, EngineDiedError] = {}
        self._identities: dict[int, bytes] = {}
        self._busy: dict[int, set[int]] = {}
        self._answers: dict[int, dict[int, Any]] = {}
        self._asked = 0
        self._answered = threading.Condition()
        self._agent: Connection | None = None
        self._pool = segment.Pool()
        self._sent: dict[int, list[Segment]] = {}
        self._links = LinkListener(os.path.join(folder, "memory.sock"))
        self._listener = Listener(os.path.join(folder, "agent.sock"), family="AF_UNIX")
        self._wake_reader, self._wake_writer = os.pipe()
        self._closed = False
        self.malformed = 0
        self._thread = threading.Thread(
            target=self._receive, name="distsession-channel", daemon=True
        )

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, 0)
        if name == "output":
            socket.setsockopt(zmq.RCVHWM, 8)
        socket.bind(f"ipc://{self._folder}/{name}.sock")
        return socket

    # --- the agent --------------------------------------------------------------------------------

    def accept_agent(self, is_alive: Callable[[], bool], deadline: float) -> bool:
        """Wait for the agent to connect; False if it ended or the time is up."""
        from multiprocessing.connection import wait

        inner = self._listener._listener._socket  # type: ignore[attr-defined]
        while not wait([inner], timeout=0.05):
            if not is_alive() or time.monotonic() > deadline:
                return False
        connection = self._listener.accept()
        assert isinstance(connection, Connection)
        self._agent = connection
        self._thread.start()
        return True

    def send_agent(self, message: Any) -> None:
        with self._lock:
            if self._agent is None or self._agent.closed:
                raise SessionStateError("the agent of this session is gone: call restart().")
            try:
                self._agent.send(message)
            except OSError as error:
                raise SessionStateError(
                    f"the agent of this session is gone ({error}): call session.restart()."
                ) from error

    # --- sending ----------------------------------------------------------------------------------

    def set_identity(self, rank: int, generation: int) -> None:
        """Requests for a rank go to its process of this generation from here on."""
        with self._lock:
            before = self._identities.get(rank)
            if before is not None:
                self._links.drop(before.decode())
            self._identities[rank] = f"{generation}.{rank}".encode()
            self._dead.pop(rank, None)
            self._busy[rank] = set()

    def link(self, ranks: Sequence[int]) -> None:
        """Take the connections of ranks that have just become ready."""
        for rank in ranks:
            with contextlib.suppress(OSError):  # it has died: that is told elsewhere
                self._links.link(self._identities[rank].decode())

    def submit(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        progress: segment.Progress | None = None,
    ) -> Pending:
        with contextlib.ExitStack() as stack:
            # Written before the lock is taken: it may take long, and a stop must not wait for it.
            parts = self._prepare(ranks, payload, progress, stack)
            with self._lock:
                self._check_open()
                for rank in ranks:
                    if rank in self._dead:
                        raise copy.copy(self._dead[rank])  # it may be given notes
                request = make(next(self._numbers))
                pending = Pending(request.id, ranks, self.budget)
                pending.answer = self.send_control
                self._pending[request.id] = pending
                encoded: dict[int, list[Any]] = {}
                for rank in ranks:
                    part = parts[rank]
                    if isinstance(part, Segment):
                        frames = self._hand_over(rank, request, part)
                    else:
                        if id(part) not in encoded:
                            encoded[id(part)] = encode(request, part)
                        frames = encoded[id(part)]
                    self._busy[rank].add(request.id)
                    identity, is_small = self._identities[rank], len(frames) == 1
                    self._route(self._requests, identity, frames, is_small=is_small)
                made = [] if isinstance(payload, Segment) else _segments(parts)
                if made:
                    self._sent[request.id] = made
                    stack.pop_all()
        return pending

    def _prepare(
        self,
        ranks: Sequence[int],
        payload: Payload,
        progress: segment.Progress | None,
        stack: contextlib.ExitStack,
    ) -> dict[int, Any]:
        """What goes to each rank: frames, or a segment, which the stack closes."""

        def prepared(frames: Any) -> Any:
            offered = segment.offer(frames, progress, self._pool)
            return frames if offered is None else stack.enter_context(offered)

        if isinstance(payload, Segment):
            return dict.fromkeys(ranks, payload)
        if isinstance(payload, Mapping):
            return {rank: prepared(payload[rank]()) for rank in ranks}
        return dict.fromkeys(ranks, prepared(payload))

    def _hand_over(self, rank: int, request: Request, part: Segment) -> list[Any]:
        """Give a rank a segment; gives the frames that tell it so."""
        try:
            link = self._links.link(self._identities[rank].decode())
            return encode(request, link.send(part))
        except OSError as error:  # if the rank has died, that is told elsewhere
            log.warning("rank %d does not take shared memory: %s", rank, error)
            return encode(request, segment.map_private(part.descriptor, part.sizes))

    def send_control(self, rank: int, message: Any) -> None:
        with self._lock:
            if not self._closed and rank in self._identities and rank not in self._dead:
                self._route(self._control, self._identities[rank], encode(message))

    def ask_stacks(self, ranks: Sequence[int], timeout: float) -> dict[int, StackReply]:
        """Ask the control threads of ranks where their main threads are."""
        return self.ask(ranks, AskStack, timeout)

    def ask(
        self, ranks: Sequence[int], make: Callable[[int], Any], timeout: float
    ) -> dict[int, Any]:
        """Ask the control threads of ranks something.

        Args:
            ranks: Whom.
            make: Makes the message from the number of the question.
            timeout: Seconds after which those who have not answered are left out.
        """
        with self._answered:
            self._asked = number = self._asked + 1
            answers = self._answers[number] = {}
        for rank in ranks:
            self.send_control(rank, make(number))
        with self._answered:
            self._answered.wait_for(lambda: len(answers) == len(ranks), timeout)
            return self._answers.pop(number)

    def is_busy(self, rank: int) -> bool:
        return bool(self._busy.get(rank))

    def pending(self) -> list[Pending]:
        with self._lock:
            return list(self._pending.values())

    def _check_open(self) -> None:
        if self._closed:
            raise SessionStateError("this session is closed: start another with Session(...).")

    def _route(
        self,
        socket: zmq.Socket[bytes],
        identity: bytes,
        frames: list[Any],
        *,
        is_small: bool = True,
    ) -> None:
        """Send to one peer; a rank that has just started may need a moment to connect."""
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while True:
            try:
                socket.send_multipart([identity, *frames], copy=is_small)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                if time.monotonic() > deadline:
                    log.warning("%s is not connected", identity)
                    return
                time.sleep(0.001)

    # --- receiving --------------------------------------------------------------------------------

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        assert self._agent is not None
        agent_fd = self._agent.fileno()
        poller.register(agent_fd, zmq.POLLIN)
        reading = False
        while not self._closed:
            if reading == self.budget.is_over:
                reading = not reading
                if reading:
                    poller.register(self._output, zmq.POLLIN)
                else:
                    poller.unregister(self._output)
            ready = dict(poller.poll(None if reading else 20))
            if self._replies in ready:
                self._drain(self._replies)
            if self._output in ready:
                self._drain(self._output, at_most=32)
            if agent_fd in ready and not self._hear_agent():
                poller.unregister(agent_fd)
        for socket in (self._requests, self._replies, self._output, self._control):
            socket.close(0)

    def _drain(self, socket: zmq.Socket[bytes], at_most: int = 1000) -> None:
        for _ in range(at_most):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            try:
                message, payload = decode(frames)
                if isinstance(payload, Shared):
                    payload = self._open(payload)
                self._take(message, payload)
            except MalformedMessage as error:
                self.malformed += 1
                log.warning("dropped a malformed message: %s", error)
            except Exception:
                self.malformed += 1
                log.exception("dropped a message that could not be handled")

    def _open(self, shared: Shared) -> Sequence[Any]:
        # Whoever sends has connected before; if it has been replaced since, nobody waits.
        link = self._links.link(shared.sender, patience=0.2)
        with link.receive(shared) as descriptor:
            return segment.map_private(descriptor, shared.sizes)

    def _take(self, message: Any, payload: Sequence[Any]) -> None:
        if isinstance(message, Reply):
            busy = self._busy.get(message.rank)
            if busy is not None:
                busy.discard(message.id)
            pending = self._pending.get(message.id)
            if pending is not None:
                pending.put_reply(message, payload)
        elif isinstance(message, (StackReply, LookReply)):
            with self._answered:
                if message.number in self._answers:
                    self._answers[message.number][message.rank] = message
                    self._answered.notify_all()
        elif hasattr(message, "request"):
            pending = self._pending.get(message.request)
            if pending is not None:
                pending.put_output(message)
            elif isinstance(message, AskInput):
                self.send_control(message.rank, InputReply(message.number, None, NOBODY))
            elif not isinstance(message, OutputEnd):
                self._background.put_output(message)
        else:
            self._on_event(message)

    def forget(self, pending: Pending) -> None:
        with self._lock:
            self._pending.pop(pending.request, None)
            sent = self._sent.pop(pending.request, [])
        for made in sent:
            if pending.missing:  # a rank that has not come to it yet cannot be seen to want it
                made.close()
            else:
                self._pool.keep(made)

    def _hear_agent(self) -> bool:
        assert self._agent is not None
        try:
            message = self._agent.recv()
        except (EOFError, OSError):
            self._on_event(None)
            return False
        except Exception:
            self.malformed += 1
            log.exception("dropped a malformed message of the agent")
            return True
        self._on_event(message)
        return True

    def bury(self, error: EngineDiedError) -> None:
        """A rank has died: nothing more is sent to it, and nobody waits for it any longer."""
        with self._lock:
            self._dead[error.rank] = error
            self._busy[error.rank] = set()
            waiting = list(self._pending.values())
        for pending in waiting:
            if error.rank in pending.ranks:
                pending.put_death(error)

    def close(self) -> None:
        """Close everything; whoever waits is told by the deaths of the ranks."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._agent is not None:
                self._agent.close()
        os.write(self._wake_writer, b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        elif not self._thread.ident:
            for socket in (self._requests, self._replies, self._output, self._control):
                socket.close(0)
        with contextlib.suppress(FileNotFoundError):  # the agent may have removed the folder
            self._listener.close()
        self._links.close()
        self._pool.close()
        for made in itertools.chain(*self._sent.values()):
            made.close()
        self._context.destroy(0)
        os.close(self._wake_reader)
        os.close(self._wake_writer)


def _segments(parts: Mapping[int, Any]) -> list[Segment]:
    """The segments among what goes to ranks, each once."""
    return list({id(p): p for p in parts.values() if isinstance(p, Segment)}.values())
