"""The messages of a node's ranks, which a relay forwards to the kernel and back.

The relay binds, in its node's folder, what the kernel binds for its own node, and has one
connection to the kernel. One thread does all of it, and waits for nobody: a rank that takes nothing
has a queue of its own, which the kernel keeps short, and output is forwarded as far as the kernel
has room for it. Nothing is unpickled on the way, and nothing that comes ends the relay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from distsession.engine.process_watch import ProcessWatch
from distsession.protocol import board_mirror, message_stream
from distsession.protocol import node_link as link
from distsession.protocol.board import Board
from distsession.protocol.board_mirror import Mirror
from distsession.protocol.message_listener import MessageListener
from distsession.protocol.message_stream import packed
from distsession.protocol.sockets import receive, send
from distsession.protocol.wire import link_path, node_folder, socket_path

__all__ = ["MessageRelay"]

log = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 10.0
"""Seconds that the kernel may take to answer a relay that has connected."""
RETRY_MS = 1, 50
"""The shortest and the longest pause between two attempts to send what ranks have not taken."""
LOOK_S = 0.02, 0.1
"""The shortest and the longest pause between two looks at the board: while ranks run something, and
while none does."""
ALIVE_S = 1.0
"""Seconds after which the kernel is told that nothing has changed, so that it knows of a relay that
is stopped or cannot be reached."""
QUIET_MS = 50
"""How long nothing may come any more from a kernel that is gone until all of it is there."""
END_TIMEOUT_S = 2.0
"""Seconds that ranks may take to make room for what has come, before the relay ends."""
LINGER_MS = 300
"""How long ranks may take to receive what has come for them before the relay has ended."""
GATHER_S = 0.001
"""Seconds that an answer waits, at most, for those of the node's other ranks to the same request.
So they travel together, and who waits for all of them waits no longer by it."""
BATCH = 256
"""Messages of one socket between two looks at the others."""
KINDS = link.REQUEST, link.CONTROL
"""What is for ranks."""


@dataclass
class _Waiting:
    """Messages for a socket of a rank that does not take them.

    Attributes:
        kind: Which socket.
        name: Of the rank.
        messages: The oldest first.
        is_connected: Whether the rank is; else it gets them when it connects.
    """

    kind: bytes
    name: bytes
    messages: deque[Sequence[Any]] = field(default_factory=deque)
    is_connected: bool = True


class MessageRelay:
    """Forwards messages until it is told to end.

    Args:
        folder: The session's.
        node: Whose ranks these are.
        epoch: Of the kernel that owns the session.
        board: Of the node.
        ranks: Of the node.
        agent: Its process, which the kernel cannot look at either.
    """

    def __init__(
        self,
        folder: str,
        node: int,
        epoch: int,
        board: Board | None = None,
        ranks: Sequence[int] = (),
        agent: int = 0,
    ):
        self._board = board
        self._mirror = None if board is None else Mirror(board, ranks)
        self._processes = None if board is None else ProcessWatch(board, ranks, agent)
        self._look_at, self._pause_s = 0.0, LOOK_S[0]
        self._told_at = 0.0
        self._node = node
        self._place, self._epoch = node_folder(folder, node), epoch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ranks = MessageListener(socket_path(self._place, "requests", epoch))
        self._control = self._bind(zmq.ROUTER, "control")
        self._output = self._bind(zmq.PULL, "output")
        name = link.relay_name(node)
        self._kernel = message_stream.connect(link_path(folder, epoch), name, asks=True)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._poller = zmq.Poller()
        for source in (self._wake_reader, self._control):
            self._poller.register(source, zmq.POLLIN)
        self._listens: tuple[bool, bool] | None = None
        self._waiting: dict[bytes, _Waiting] = {}
        self._taken: defaultdict[bytes, int] = defaultdict(int)
        self._answers: list[list[Any]] = []
        """What waits for other ranks' answers, and until when at most."""
        self._answers_until = 0.0
        self._missing = 0
        """How many answers to the last request have not come, if no other request was answered."""
        self._credit = link.OUTPUT_WINDOW
        self._is_ending = False
        self.malformed = 0

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, link.WINDOW)
        if name == "output":
            socket.setsockopt(zmq.RCVHWM, 8)
        socket.bind(f"ipc://{socket_path(self._place, name, self._epoch)}")
        return socket

    @property
    def wake_writer(self) -> int:
        """What is written to this descriptor ends the relay."""
        return self._wake_writer

    def end(self) -> None:
        """From another thread, or a signal handler: end."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def greet(self) -> None:
        """Wait until the kernel knows this relay.

        Raises:
            ConnectionError: It does not answer.
        """
        self._kernel.post(packed([link.HELLO, link.pack_count(time.monotonic_ns())]))
        self._kernel.flush()
        deadline = time.monotonic() + WELCOME_TIMEOUT_S
        while not (messages := self._kernel.receive()):  # of the welcome it may be only a part
            if self._kernel.is_over or not self._kernel.wait(deadline - time.monotonic()):
                raise ConnectionError("the kernel does not answer")
        self._take(messages)

    # --- the loop ---------------------------------------------------------------------------------

    def serve(self) -> None:
        """Forward messages until :meth:`end`."""
        sources: dict[object, Callable[[], None]] = {
            self._wake_reader: self._note_end,
            self._kernel.fileno(): self._receive_messages,
            self._ranks.descriptor: self._forward_replies,
            self._output: self._forward_output,
            self._control: self._drop_all,
        }
        pause, longest = RETRY_MS
        self._flush()  # what came with the welcome
        while not self._is_ending:
            self._listen()
            waits = bool(self._waiting)
            ready = dict(self._poller.poll(self._poll_ms(pause if waits else None)))
            for source, handle in sources.items():
                if source in ready:
                    handle()
            if self._answers:
                self._hand_answers_on()
            if self._waiting:
                self._retry()
            self._look()
            self._flush()
            pause = min(2 * pause, longest) if waits else RETRY_MS[0]
        self._finish()

    def _poll_ms(self, pause_ms: int | None) -> int | None:
        """How long to wait for something: until ranks are tried again, or the board looked at."""
        if self._answers and not self._kernel.holds_something:
            pause_ms = round(1000 * GATHER_S)
        if self._mirror is None:
            return pause_ms
        look_ms = max(0, round(1000 * (self._look_at - time.monotonic())))
        return look_ms if pause_ms is None else min(look_ms, pause_ms)

    def _look(self, *, at_once: bool = False) -> None:
        """Send what has changed on the board, or that nothing has."""
        now = time.monotonic()
        holds = self._kernel.holds_something
        if self._mirror is None or holds or (now < self._look_at and not at_once):
            return
        if self._processes is not None:
            self._processes.look()
        changes = self._mirror.changes(before_answer=at_once)
        if not at_once:
            shortest, longest = LOOK_S
            is_active = changes or self._mirror.is_running()
            self._pause_s = shortest if is_active else min(longest, 2 * self._pause_s)
            self._look_at = now + self._pause_s
        if changes or now - self._told_at > ALIVE_S:
            self._told_at = now
            clock = link.pack_count(time.monotonic_ns())
            self._kernel.post(packed([link.BOARD, clock, *board_mirror.pack(changes)]))

    def _note_end(self) -> None:
        self._is_ending = True

    def _listen(self) -> None:
        """Look only at what there is something to do with."""
        state = not self._kernel.holds_something, self._credit > 0
        if state == self._listens:
            return
        self._listens = is_free, has_credit = state
        both = zmq.POLLIN | zmq.POLLOUT
        self._poller.register(self._kernel.fileno(), zmq.POLLIN if is_free else both)
        self._poller.register(self._ranks.descriptor, zmq.POLLIN if is_free else 0)
        self._poller.register(self._output, zmq.POLLIN if is_free and has_credit else 0)

    def _finish(self) -> None:
        """Hand on what has come, and close everything."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._comes_more() or self._can_hand_on():
            self._receive_messages()
            for _ in self._ranks.receive():  # sends what was left
                pass
            self._retry()
            if time.monotonic() > deadline:
                break
        self._ranks.close(LINGER_MS)
        for socket in (self._control, self._output):
            socket.close()
        self._kernel.close()
        self._context.term()

    def _comes_more(self) -> bool:
        """Whether something comes from the kernel, or may still come."""
        return not self._kernel.is_over and self._kernel.wait(QUIET_MS / 1000)

    def _can_hand_on(self) -> bool:
        """Whether messages wait for ranks that are there."""
        return any(waiting.is_connected for waiting in self._waiting.values())

    def _drop_all(self) -> None:
        """Ranks send nothing on their control sockets."""
        for _ in range(BATCH):
            try:
                receive(self._control)
            except zmq.Again:
                return
            self.malformed += 1

    # --- to the kernel ----------------------------------------------------------------------------

    def _forward_replies(self) -> None:
        """Take what has come by now, to be handed on when the others' answers are there."""
        if self._kernel.holds_something:
            return
        came = [[link.REPLY, *frames] for _, frames in self._ranks.receive()]
        if came and not self._answers:
            self._answers_until = time.monotonic() + GATHER_S
        self._answers += came
        self._missing -= len(came)

    def _hand_answers_on(self) -> None:
        """Hand them on if they have waited enough, behind one look at the board for all."""
        is_late = time.monotonic() >= self._answers_until
        # Where there is no room, the board could not be sent before them.
        has_room = not self._kernel.holds_something
        if self._is_ending or (has_room and (is_late or self._missing <= 0)):
            answers, self._answers = self._answers, []
            self._look(at_once=True)
            self._hand_on(answers)

    def _forward_output(self) -> None:
        """The same, as far as the kernel has room for it."""
        if self._kernel.holds_something:
            return
        messages: list[list[Any]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < min(BATCH, self._credit):
                messages.append([link.OUTPUT, *receive(self._output)])
        self._credit -= len(messages)
        self._hand_on(messages)

    def _hand_on(self, messages: Sequence[list[Any]]) -> None:
        for frames in messages:
            self._kernel.post(packed(frames))
        self._flush()

    def _flush(self) -> None:
        if self._kernel.holds_something:
            with contextlib.suppress(OSError):  # the kernel is gone: its end ends the relay, too
                self._kernel.flush()

    def _note_taken(self, key: bytes, count: int) -> None:
        """Tell the kernel now and then how many messages have left the relay."""
        self._taken[key] += count
        if self._taken[key] >= link.WINDOW // 2:
            taken = link.pack_count(self._taken.pop(key))
            self._kernel.post(packed([link.TAKEN, key, taken]))

    # --- to ranks ---------------------------------------------------------------------------------

    def _receive_messages(self) -> None:
        self._take(self._kernel.receive())
        if self._kernel.is_over and self._kernel.fileno() in self._poller:
            self._poller.unregister(self._kernel.fileno())
            self._is_ending = True

    def _take(self, messages: Sequence[list[Any]]) -> None:
        for frames in messages:
            try:
                self._receive(frames)
            except Exception as error:
                self.malformed += 1
                log.warning("dropped a message that cannot be forwarded: %r", error)

    def _receive(self, frames: list[Any]) -> None:
        kind, *rest = frames
        if kind in KINDS:
            joined, *message = rest
            names = link.split_names(joined)
            if kind == link.REQUEST:
                self._missing = len(names)
            for name in names:
                self._hand(kind, name, message)
        elif kind == link.CREDIT:
            (count,) = rest
            self._credit += link.unpack_count(count)
        elif kind == link.FORGET:
            (name,) = rest
            for kind in KINDS:
                self._waiting.pop(link.key_of(kind, name), None)
                self._taken.pop(link.key_of(kind, name), None)
        elif kind in (link.WORDS, link.WELCOME):
            self._write_words(rest)
        else:
            raise ValueError(f"of an unknown kind: {kind[:10]!r}")

    def _write_words(self, frames: list[Any]) -> None:
        if not frames or self._board is None:
            return
        for at, word in board_mirror.unpack_words(frames):
            self._board.words[at] = word

    def _hand(self, kind: bytes, name: bytes, message: Sequence[Any]) -> None:
        key = link.key_of(kind, name)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = _Waiting(kind, name)
            if self._try(waiting, message):
                return
            self._waiting[key] = waiting
        waiting.messages.append(message)

    def _try(self, waiting: _Waiting, message: Sequence[Any]) -> bool:
        """Send to a rank; False if it takes nothing now."""
        send_it = self._try_request if waiting.kind == link.REQUEST else self._try_control
        is_sent = send_it(waiting.name, message)
        waiting.is_connected = is_sent is not None
        if is_sent:
            self._note_taken(link.key_of(waiting.kind, waiting.name), 1)
        return bool(is_sent)

    def _try_request(self, name: bytes, message: Sequence[Any]) -> bool | None:
        """The same; None if it is not connected."""
        rank = self._ranks.find(name)
        if rank is None:
            return None
        if rank.stream.holds_something:
            return False
        self._ranks.send(name, packed(message))
        return True

    def _try_control(self, name: bytes, message: Sequence[Any]) -> bool | None:
        """The same."""
        try:
            send(self._control, (name, *message), wait=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return None
        return True

    def _retry(self) -> None:
        """Send what ranks had not taken: one may just have started, or gone on after a stop."""
        for key, waiting in list(self._waiting.items()):
            while waiting.messages and self._try(waiting, waiting.messages[0]):
                waiting.messages.popleft()
            if not waiting.messages:
                del self._waiting[key]
