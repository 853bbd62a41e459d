"""Our own road to the ranks: unix sockets in a folder of the session.

Requests and answers take a stream to each rank, output and what must pass them sockets of zmq. To
ranks of the kernel's own node that is one hop; to those of another, a second one through its
relay. Requests leave from whichever thread makes them, straight on the socket; one thread receives
everything, but for the answers to a short call (see ``receiving``). The folder can be opened by its
user alone, which is the authentication of all of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import zmq

from distsession.cluster.base import Channel, Payload
from distsession.cluster.deaths import joint_error
from distsession.cluster.interrupts import InterruptHold, interrupts_held
from distsession.cluster.monitor import NodeGone
from distsession.cluster.node_links import NodeLinks
from distsession.cluster.payloads import Part, Payloads
from distsession.cluster.peer_words import PeerWords
from distsession.cluster.pending import NOBODY, OutputBudget, PendingRequest, nobody_listens
from distsession.cluster.receiving import Receiving
from distsession.cluster.relay import Upload
from distsession.errors import DistsessionError, EngineDiedError, SessionStateError
from distsession.protocol import board_mirror, node_link, serialize, whole_messages
from distsession.protocol.board import Board
from distsession.protocol.message_listener import MessageListener
from distsession.protocol.message_stream import Packed, packed
from distsession.protocol.messages import (
    Addressed,
    Buffered,
    CompletionReply,
    ErrorInfo,
    InputReply,
    InputRequest,
    MalformedMessage,
    OutputEnd,
    PushRequest,
    Reason,
    Reply,
    Request,
    Shared,
    StackReply,
    StackRequest,
    decode,
    encode,
)
from distsession.protocol.shared_buffer import Place
from distsession.protocol.shared_memory import Progress, Segment
from distsession.protocol.sockets import receive, send
from distsession.protocol.wire import link_path, socket_path

__all__ = ["SocketChannel"]

log = logging.getLogger(__name__)

SHARE_MS = 20
"""How long nothing may come until it is looked whether output can be taken in again, and whether
ranks of other nodes have something to know of those of this one."""

OUTPUT_AT_ONCE = 32
"""Messages of output between two looks at whether something else has come."""

CONNECT_TIMEOUT = 10.0
"""Seconds that a rank which is ready may take to connect its control socket."""


class SocketChannel(Channel):
    """The sockets of one session.

    Args:
        folder: An existing folder that only this user can open.
        on_event: Called by the channel's thread with every message that is no part of a run:
            readiness, failures and ends of ranks and agents. ``NodeGone`` says that the link of a
            node's agent has closed; ``None`` the same of the first node's. It must not block.
        background: Takes output that belongs to no run.
        epoch: Which owner of the session this is.
        is_kept: Another owner may attach when this one is gone.
    """

    def __init__(
        self,
        folder: str,
        on_event: Callable[[Any], None],
        background: PendingRequest,
        *,
        epoch: int = 1,
        is_kept: bool = False,
    ):
        self._folder = folder
        self._epoch = epoch
        self._is_kept = is_kept
        self.board: Board | None = None
        """Where ranks of a session that is kept see what has been sent and what was seen."""
        self.refusal = ""
        """Why nothing can be sent any more though the session is not closed."""
        self._on_event = on_event
        self.budget = OutputBudget()
        self._background = background
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._rank_streams = MessageListener(socket_path(folder, "requests", epoch))
        self._receiving = Receiving(self._rank_streams)
        self._output = self._bind(zmq.PULL, "output")
        self._control = self._bind(zmq.ROUTER, "control")
        self.links = NodeLinks(
            link_path(folder, epoch),
            self._on_node,
            self._on_board,
        )
        self._peer_words: PeerWords | None = None
        self._changed_ranks: set[int] = set()
        self._lock = threading.Lock()
        self._last = 0
        self._pending: dict[int, PendingRequest] = {}
        self._dead: dict[int, EngineDiedError] = {}
        self._identities: dict[int, bytes] = {}
        self._nodes: dict[int, int] = {}
        self._muted: set[int] = set()
        """Ranks of which what belongs to no run is not shown."""
        self._ranks: dict[int, dict[int, None]] = {}
        """Of each node. What comes of one must not cost more where there are many."""
        self._busy: dict[int, dict[int, None]] = {}
        self._answers: dict[int, dict[int, Any]] = {}
        self._asked = 0
        self._answered = threading.Condition()
        self.payloads = Payloads(folder, epoch)
        self._poller = zmq.Poller()
        self._agents: dict[int, tuple[int, Connection]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        self._closed = False
        self._linger_ms = 0
        self.malformed = 0
        self.shares_board = True
        """The ranks of all nodes have one board; else each node has its own."""
        self.complete: Callable[[Reason], Reason] = lambda reason: reason
        """Adds to why an operation broke off what its rank could not see."""
        self.has_ended: Callable[[int], bool] = lambda rank: False
        """Whether the process of a rank is known to be gone."""
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
        socket.bind(f"ipc://{socket_path(self._folder, name, self._epoch)}")
        return socket

    # --- agents -----------------------------------------------------------------------------------

    def add_agent(self, node: int, connection: Connection) -> None:
        """Listen to the agent of a node, too."""

        def begin() -> None:
            self._agents[connection.fileno()] = (node, connection)
            self._poller.register(connection.fileno(), zmq.POLLIN)

        if self._thread.ident:
            self._call_soon(begin)
        else:
            begin()
            self._thread.start()

    def _call_soon(self, work: Callable[[], None]) -> None:
        """Have something done by the thread that receives everything."""
        self._calls.append(work)
        self._wake()

    def _wake(self) -> None:
        if not self._closed:
            os.write(self._wake_writer, b"x")

    # --- sending ----------------------------------------------------------------------------------

    def set_identity(self, rank: int, generation: int, node: int = 0) -> None:
        """Requests for a rank go to its process of this generation from here on."""
        with self._lock:
            name = f"{generation}.{rank}"
            self.payloads.place(rank, name, node)
            self._forget_identity(rank)
            if self._nodes.get(rank, node) != node:
                self._ranks[self._nodes[rank]].pop(rank)
            self._identities[rank], self._nodes[rank] = name.encode(), node
            self._ranks.setdefault(node, {})[rank] = None
            self._dead.pop(rank, None)
            self._busy[rank] = {}
            self._muted.discard(rank)

    def mute(self, ranks: Iterable[int]) -> None:
        """These are to end before they have run anything: what they write about it tells nobody."""
        with self._lock:
            self._muted.update(ranks)

    def _forget_identity(self, rank: int) -> None:
        if self._nodes.get(rank):
            self.links.forget(self._nodes[rank], self._identities[rank])
        elif rank in self._identities:
            self._rank_streams.forget(self._identities[rank])

    def submit(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        progress: Progress | None = None,
        interrupts: InterruptHold | None = None,
    ) -> PendingRequest:
        with contextlib.ExitStack() as stack:
            # Written before the lock is taken: it may take long, and a stop must not wait for it.
            parts = self.payloads.prepare(ranks, payload, progress, stack)
            if interrupts is not None:
                interrupts.hold(self._receiving.wake)
                # Of several hosts, answers come to the channel's thread in any case.
                if not self.links.nodes and self._receiving.take():
                    interrupts.then(self._receiving.give_back)
            pending = self._send(ranks, make, parts)
            if not isinstance(payload, Segment):  # which its owner keeps
                self.payloads.keep(pending.request, parts, stack)
        return pending

    def _send(
        self, ranks: Sequence[int], make: Callable[[int], Request], parts: Mapping[int, Part]
    ) -> PendingRequest:
        # What is half sent to a rank could not be followed by anything.
        with interrupts_held(), self._lock:
            self._check_open()
            self._check_living(ranks)
            self._last += 1
            request = make(self._last)
            message = Addressed(request, tuple(ranks)) if self._is_kept else request
            queued = all(self._busy[rank] for rank in ranks)
            pending = PendingRequest(
                request.id,
                ranks,
                self.budget,
                self.send_control,
                queued=queued,
                only_stages=isinstance(request, PushRequest),
            )
            self._pending[request.id] = pending
            try:
                self._send_to_all(message, request.id, ranks, parts)
            finally:
                if self._is_kept and self.board is not None:
                    self.board.commit(self._epoch, request.id)
                    self.share_words()
        return pending

    def _send_to_all(
        self, message: Any, number: int, ranks: Sequence[int], parts: Mapping[int, Part]
    ) -> None:
        encoded: dict[int, list[Any]] = {}
        near: dict[int, Packed] = {}
        far: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            part = parts[rank]
            self._busy[rank][number] = None
            if id(part) not in encoded and isinstance(part, (list, Place)):
                content = part if isinstance(part, list) else part.buffered
                encoded[id(part)] = encode(message, content)
            if self._nodes[rank]:
                far.setdefault((self._nodes[rank], id(part)), []).append(rank)
                continue
            if isinstance(part, Segment):
                whole = packed(self.payloads.encode(rank, message, part))
            elif isinstance(part, Place) and not self.payloads.reach(rank, part):
                whole = packed(encode(message, part.frames()))
            elif id(part) in near:
                whole = near[id(part)]
            else:
                whole = near[id(part)] = packed(encoded[id(part)])
            self._send_request(self._identities[rank], whole)
        messages = []
        for (node, key), group in far.items():
            part = parts[group[0]]
            frames = (
                self.payloads.hand(group, message, part)
                if isinstance(part, Upload)
                else encoded[key]
            )
            messages.append((node, self._names(group), frames))
        if messages:
            self.links.send_each(node_link.REQUEST, messages)

    @property
    def commits_pushes(self) -> bool:  # type: ignore[override]
        # What is staged in a session that is kept may have to wait for another owner's word.
        return self.board is not None and self.shares_board and not self._is_kept

    def commit_push(self, number: int, ranks: Sequence[int]) -> bool:
        with self._lock:
            self._check_open()
            self._check_living(ranks)
            board = self.board
            if board is None or not self.commits_pushes:
                return False
            # Of what is on its way one rank might see the old values and another the new ones.
            if any(self._busy[rank] for rank in ranks):
                return False
            # There is one such word: others may not have come to setting what it says now.
            if any(region.staged for region in board.regions if region.rank not in ranks):
                return False
            board.commit_push(number)
            return True

    def _check_living(self, ranks: Sequence[int]) -> None:
        if dead := {rank: self._dead[rank] for rank in ranks if rank in self._dead}:
            raise joint_error(dead)

    def _names(self, ranks: Sequence[int]) -> list[bytes]:
        """Of their present processes."""
        return [self._identities[rank] for rank in ranks]

    def adopt(self, number: int, ranks: Sequence[int], busy: Sequence[int]) -> PendingRequest:
        """Wait for a request that a former owner has sent.

        Args:
            number: Its own.
            ranks: That were sent it.
            busy: Those of them that have not answered.
        """
        with self._lock:
            pending = PendingRequest(number, ranks, self.budget, self.send_control)
            self._pending[number] = pending
            for rank in busy:
                self._busy[rank][number] = None
            self._last = max(self._last, number)
        return pending

    def go_on_after(self, number: int) -> None:
        """A former owner has given its requests numbers up to this one."""
        with self._lock:
            self._last = max(self._last, number)

    def _acknowledge(self) -> None:
        """Tell the ranks, in memory that they share, whose answers nobody needs any more."""
        if self._closed or not self._is_kept or self.board is None:
            return
        if self.refusal:  # another process owns the session now, and wants the answers
            return
        seen = min(self._pending, default=self._last + 1) - 1
        self.board.acknowledge(self._epoch, seen)
        self.share_words()

    # --- the boards of other nodes ----------------------------------------------------------------

    def share_words(self) -> None:
        """Write what the kernel says to all ranks on the boards of the other nodes, too."""
        if not self.shares_board and (nodes := self.links.nodes):
            self.links.write_words(nodes, self._shared_words())

    def _shared_words(self) -> list[bytes]:
        if self.board is None or self.shares_board:
            return []
        return board_mirror.pack_words(self.board.kernel_words())

    def _on_node(self, node: int, clock_behind_ns: int) -> list[bytes]:
        if self._peer_words is not None:
            self._peer_words.forget(node)
        if not self.shares_board:
            self._set_clock(node, clock_behind_ns)
        return self._shared_words()

    def _on_board(self, node: int, clock_behind_ns: int, frames: list[bytes]) -> None:
        if self.board is None:
            return
        ranks = self._ranks_of(node)
        # What it took to come here counts as well, so the least of all is the nearest.
        before = self.board.regions[ranks[0]].clock_behind_ns
        self._set_clock(node, min(before, clock_behind_ns))
        board_mirror.apply(self.board, board_mirror.unpack(frames), ranks)
        self._changed_ranks.update(ranks)

    def _set_clock(self, node: int, behind_ns: int) -> None:
        if self.board is not None:
            for rank in self._ranks_of(node):
                self.board.regions[rank].clock_behind_ns = behind_ns

    def _ranks_of(self, node: int) -> list[int]:
        return list(self._ranks.get(node, ()))

    def _share_peer_words(self) -> None:
        """Have the boards of other nodes say what their ranks read of ranks that are elsewhere."""
        if self.board is None or not (nodes := self.links.nodes):
            return
        if self._peer_words is None:
            self._peer_words = PeerWords(self.board, lambda rank: self._nodes.get(rank, 0))
        ranks, self._changed_ranks = {*self._ranks_of(0), *self._changed_ranks}, set()
        for node, words in self._peer_words.changes(ranks, nodes).items():
            self.links.write_words([node], board_mirror.pack_words(words))

    def clear_input_request(self, rank: int) -> None:
        """A rank has died, so it is in no debugger and waits for no input."""
        if self.board is None:
            return
        words = self.board.regions[rank].clear_input_request()
        if not self.shares_board:
            self.links.write_words(self.links.nodes, board_mirror.pack_words(words))

    def send_control(self, rank: int, message: Any) -> None:
        self.broadcast([rank], message)

    def broadcast(self, ranks: Sequence[int], message: Any) -> None:
        """Send several ranks the same that is no request; to those that have ended, nothing."""
        frames = encode(message)
        with self._lock:
            if self._closed:
                return
            far: dict[int, list[int]] = {}
            for rank in ranks:
                if rank not in self._identities or rank in self._dead:
                    continue
                if self._nodes[rank]:
                    far.setdefault(self._nodes[rank], []).append(rank)
                else:
                    self._send_control(self._identities[rank], frames)
            if far:
                messages = [(node, self._names(group), frames) for node, group in far.items()]
                self.links.send_each(node_link.CONTROL, messages)

    def process_of(self, rank: int) -> int | None:
        identity = self._identities.get(rank)
        if self._closed or identity is None or rank in self._dead:
            return None
        return int(identity.partition(b".")[0])

    def request_stacks(self, ranks: Sequence[int], timeout: float) -> dict[int, StackReply]:
        """Ask the control threads of ranks where their main threads are."""
        return self.query(ranks, StackRequest, timeout)

    def query(
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
        self.broadcast(ranks, make(number))
        with self._answered:
            self._answered.wait_for(lambda: len(answers) == len(ranks), timeout)
            return self._answers.pop(number)

    def is_busy(self, rank: int) -> bool:
        return bool(self._busy.get(rank))

    def pending(self) -> list[PendingRequest]:
        with self._lock:
            return list(self._pending.values())

    def _check_open(self) -> None:
        if self.refusal:
            raise SessionStateError(self.refusal)
        if self._closed:
            raise SessionStateError("this session is closed: start another with Session(...).")

    def _send_request(self, identity: bytes, message: Packed) -> None:
        # One that is about to connect gets it then, however long a busy machine takes for that.
        if not self._rank_streams.send(identity, message, keep=True):
            self._receiving.give_back()  # somebody has to take in that it connects

    def _send_control(self, identity: bytes, frames: list[Any]) -> None:
        def send_it() -> bool:
            try:
                send(self._control, (identity, *frames))
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False
            return True

        # A rank that has just started may need a moment to connect. One that has ended never does,
        # and its death cannot be noted while this holds the lock.
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while not send_it() and not self.has_ended(int(identity.rpartition(b".")[2])):
            if time.monotonic() > deadline:
                log.warning("%s is not connected", identity)
                return
            time.sleep(0.001)

    # --- receiving --------------------------------------------------------------------------------

    def _receive(self) -> None:
        poller, relays = self._poller, self.payloads.relays.listener.fileno()
        ranks, links = self._receiving.descriptor, self.links.descriptor
        for source in (ranks, self._wake_reader, relays, links):
            poller.register(source, zmq.POLLIN)
        reading = False
        while not self._closed:
            if reading == self.budget.is_over:
                reading = not reading
                if reading:
                    poller.register(self._output, zmq.POLLIN)
                else:
                    poller.unregister(self._output)
            if reading:
                self.links.grant()
            is_told = bool(not self.shares_board and self._pending and self.links.nodes)
            ready = dict(poller.poll(SHARE_MS if is_told or not reading else None))
            if ranks in ready:
                for frames in self._receiving.receive():
                    self._take(frames)
            if self._output in ready:
                self._drain_output()
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
                while self._calls:
                    self._calls.popleft()()
            if links in ready:
                for frames in self.links.receive():
                    self._take(frames)
            if is_told:
                self._share_peer_words()
            if relays in ready and not self._closed:
                self.payloads.relays.accept()
            for descriptor, (node, agent) in list(self._agents.items()):
                if descriptor in ready and not self._receive_from_agent(node, agent):
                    poller.unregister(descriptor)
                    del self._agents[descriptor]
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._receiving.close()
        for socket in (self._output, self._control):
            socket.close(self._linger_ms)
        for listener in (self._rank_streams, self.links):
            listener.close(self._linger_ms)

    def _drain_output(self) -> None:
        for _ in range(OUTPUT_AT_ONCE):
            try:
                frames = receive(self._output)
            except zmq.Again:
                return
            self._take(frames)

    def receive_for(self, pending: PendingRequest, until: float) -> None:
        def is_over() -> bool:
            return pending.has_event or self._closed

        pending.on_event = self._receiving.wake
        try:
            for messages in self._receiving.receive_until(is_over, until):
                self._take_answers(deque(messages))
        finally:
            pending.on_event = nobody_listens

    def _take_answers(self, messages: deque[list[bytes]]) -> None:
        """Not by the channel's thread, to which all is left that is no plain answer."""
        try:
            while messages:
                self._take_answer(messages[0])
                messages.popleft()
        finally:  # a handler of a signal of the user's may raise here; to take one twice is no harm
            for frames in messages:
                self._call_soon(partial(self._take, frames))

    def _take_answer(self, frames: list[bytes]) -> None:
        try:
            message, payload = decode(frames)
        except MalformedMessage:  # which is told there
            message, payload = None, ()
        if isinstance(message, Reply) and not isinstance(payload, (Shared, Buffered)):
            self._note_reply(message, payload)
        else:
            self._call_soon(partial(self._take, frames))

    def _take(self, frames: Sequence[bytes | memoryview]) -> None:
        """Take in what a rank has sent."""
        try:
            message, payload = decode(frames)
            if isinstance(payload, Shared):
                if not self.payloads.is_here(payload):
                    self._fetch(message, payload)
                    return
                payload = self.payloads.open(payload)
            elif isinstance(payload, Buffered):
                raise MalformedMessage("what only this process may send")
            self._dispatch(message, payload)
        except MalformedMessage as error:
            self.malformed += 1
            log.warning("dropped a malformed message: %s", error)
        except Exception:
            self.malformed += 1
            log.exception("dropped a message that could not be handled")

    def _fetch(self, reply: Reply, shared: Shared) -> None:
        """A rank of another node has answered; the reply is taken when its payload is here."""
        rank, pending = reply.rank, self._pending.get(reply.id)
        self._note_answer(rank, reply.id)
        if pending is not None:
            pending.put_progress(rank, 0, sum(shared.sizes))

        def is_wanted() -> bool:
            return pending is not None and pending.is_wanted

        def note(done: int, total: int) -> None:
            if pending is not None:
                pending.put_progress(rank, done, total)

        def done(frames: Sequence[Any], error: DistsessionError | None) -> None:
            if error is None:
                self._call_soon(lambda: self._dispatch(reply, frames))
            else:
                info = ErrorInfo(type(error).__name__, str(error))
                failed = serialize.dump_value(error, what="an error")
                self._call_soon(lambda: self._dispatch(replace(reply, error=info), failed))

        self.payloads.fetch(shared, is_wanted, note, done)

    def _dispatch(self, message: Any, payload: Sequence[Any]) -> None:
        if isinstance(message, Reply):
            self._note_reply(message, payload)
        elif isinstance(message, (StackReply, CompletionReply)):
            with self._answered:
                if message.number in self._answers:
                    self._answers[message.number][message.rank] = message
                    self._answered.notify_all()
        elif hasattr(message, "request"):
            pending = self._pending.get(message.request)
            if pending is not None:
                pending.put_output(message)
            elif isinstance(message, InputRequest):
                self.send_control(message.rank, InputReply(message.number, None, NOBODY))
            elif not isinstance(message, OutputEnd) and message.rank not in self._muted:
                self._background.put_output(message)
        else:
            self._on_event(message)

    def _note_reply(self, reply: Reply, payload: Sequence[Any]) -> None:
        if reply.reason is not None:
            reply = replace(reply, reason=self.complete(reply.reason))
        self._note_answer(reply.rank, reply.id)
        pending = self._pending.get(reply.id)
        if pending is not None:
            pending.put_reply(reply, payload)

    def _note_answer(self, rank: int, number: int) -> None:
        with self._lock:
            busy = self._busy.get(rank, {})
            busy.pop(number, None)
            following = self._pending.get(next(iter(busy))) if busy else None
        if following is not None:
            following.come_next()

    def forget(self, pending: PendingRequest) -> None:
        pending.abandon()
        with self._lock:
            self._pending.pop(pending.request, None)
            self._acknowledge()
            taken = len(pending.replies) == len(pending.ranks)  # a rank may only seem to be dead
            self.payloads.forget(pending.request, taken=taken)

    def _receive_from_agent(self, node: int, agent: Connection) -> bool:
        """Take in a message of an agent; False if there will be no more."""
        try:
            data = whole_messages.receive_bytes(agent, whole_messages.MESSAGE_TIMEOUT_S)
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                log.warning("the agent of node %d is given up: %s", node, error)
            self._on_event(NodeGone(node) if node else None)
            return False
        try:
            self._on_event(pickle.loads(data))
        except Exception:
            self.malformed += 1
            log.exception("dropped a malformed message of the agent")
        return True

    def mark_dead(self, errors: Sequence[EngineDiedError]) -> None:
        """Ranks have died: nothing more is sent to them, and nobody waits for them any longer."""
        with self._lock:
            for error in errors:
                self._dead[error.rank] = error
                self._busy[error.rank] = {}
                self._forget_identity(error.rank)
            waiting = list(self._pending.values())
        for pending in waiting:
            for error in errors:
                if error.rank in pending.ranks:
                    pending.put_death(error)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close everything; whoever waits is told by the deaths of the ranks.

        Args:
            linger_ms: How long what has been sent may take to leave this process.
        """
        if linger_ms and not self._closed and self._thread.ident:
            self.links.wait_sent(linger_ms / 1000)
        with self._lock:
            if self._closed:
                return
            self._closed, self._linger_ms = True, linger_ms
        os.write(self._wake_writer, b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        elif not self._thread.ident:
            self._close_sockets()
        self._context.destroy(self._linger_ms)  # what was sent has left when the relays end
        self.payloads.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
