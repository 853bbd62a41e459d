"""The side thread of a rank: it answers while the main thread is busy or blocked."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import zmq

from distsession.engine import forced_end, frames, whole_writes
from distsession.engine.caught import caught_text
from distsession.engine.execute import awaiting
from distsession.engine.failure import is_user_code, line_name
from distsession.engine.forced_end import ForcedEnd
from distsession.engine.guarded import TakesTooLong
from distsession.engine.whole_writes import COME_AGAIN
from distsession.protocol.attach import SetOwner
from distsession.protocol.messages import Abort, MalformedMessage, decode
from distsession.protocol.sockets import receive

__all__ = ["CALLBACK", "Control", "Interrupter"]

log = logging.getLogger(__name__)

CALLBACK = -1
"""Stands for a request while a widget's callback runs, which a stop of any request ends."""
REPORT = -2
"""Stands for a request where an error is shown that is none of a request's."""
INTERRUPT_RETRY_S = 0.3
"""Seconds after which an interrupt that had no effect is repeated, once."""
ABORT_GRACE_S = 0.06
"""Seconds for which operations that are under way may still end by themselves: gloo (torch 2.13)
now and then loses one when its connections are shut in the midst of it."""
REPEAT_S = 0.002
"""Seconds after which an interrupt that was let pass, or swallowed, is sent again."""
LONGEST_REPEAT_S = 0.1
"""Seconds between two such repeats later on."""
FORCE_EVERY_S = 0.1
"""Seconds between two attempts to end code that catches every interrupt."""
CHECK_EVERY_MS = 500
"""Between two looks at whether a time limit is over, while there is one."""
STUCK_AFTER_S = 0.3
"""Seconds after that until a main thread that was not seen in any operation is looked at again."""
FREED_GRACE_S = 0.1
"""Seconds that a main thread which waited in a collective has to come back by itself."""
CONTEXT_GRACE_S = 0.1
"""Seconds that a library has to enter or leave a context before it is interrupted there."""
_CONTEXT_CODE = frozenset({"__enter__", "__exit__"})
IMPORT_GRACE_S = 20.0
"""Seconds that the import of a library has to come to its end before it is cut off."""
IMPORT_POLL_S = 0.05
"""Seconds between two looks at whether it has."""


class Interrupter:
    """Raises KeyboardInterrupt in user code, and nowhere else.

    A SIGINT that came a moment too late would otherwise hit the engine's own code and end it. One
    that comes while a library is imported waits for the end of that: Python forgets a package whose
    import was cut off, but not the modules of it that were there by then, and without these as its
    attributes it is of no use to any later import ("module 'sympy' has no attribute 'printing'").
    One that comes in the midst of a print waits for the end of that, or its line would be lost.
    One that comes as a library enters or leaves a context waits for that: what ``torch.no_grad``
    has switched off, or torch's default device, would be off in all later cells.
    """

    def __init__(self) -> None:
        self._running = 0
        self._last = 0
        self._target = 0
        self._asked = 0
        """The request that was to be interrupted last."""
        self._raised: KeyboardInterrupt | None = None
        self._error: tuple[int, Callable[[], BaseException]] = (0, KeyboardInterrupt)
        self._held_since: float | None = None
        """When an interrupt came first that waits for the end of an import."""
        self._is_handling = False
        self._passed_at: float | None = None
        """When one was let pass first, as a print may be under way; it is to come again at once."""
        self.request_repeat: Callable[[], None] = lambda: None
        """Called in the main thread, wherever that is: has another thread call :meth:`repeat`.

        No thread may be started there: the code that a signal came to may hold the lock for that.
        """
        self._is_swallowed = False
        self._main = threading.main_thread()
        signal.signal(signal.SIGINT, self.on_signal)

    @contextmanager
    def user_code(self, request: int) -> Iterator[None]:
        """User code of this request runs within."""
        self._running = self._last = request
        is_forced = False
        try:
            yield
        except ForcedEnd:
            is_forced = True
        finally:
            self._running = 0  # before any call, within which an interrupt might be raised
            self.leave()
        if is_forced:
            raise KeyboardInterrupt

    def leave(self) -> None:
        """No user code runs, and nothing is raised from here on."""
        self._running = 0
        forced_end.end()
        self._passed_at = self._raised = self._held_since = None

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Code of the user's runs within that shows an error, and is ended after some seconds.

        A Stop of the request that failed ends it, too.
        """
        if self._running or threading.current_thread() is not self._main:
            yield  # a Stop reaches it, or nothing does
            return
        timer = threading.Timer(seconds, self._end_limited)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the system starts no thread; the error to show may say so
            yield
            return
        self._error = (0, KeyboardInterrupt)
        try:
            with self.user_code(self._last or REPORT):
                yield
        finally:
            timer.cancel()

    def _end_limited(self) -> None:
        if self._running and self._main.ident is not None:
            self._error = self._running, TakesTooLong
            signal.pthread_kill(self._main.ident, signal.SIGINT)

    def target(self, request: int) -> None:
        """From another thread: this request is to be interrupted, once."""
        self._target = self._asked = request

    def interrupt(self, request: int) -> None:
        """From another thread: interrupt this request, if it still runs and is to be.

        A repeat that comes late does not reach the next one: that may be one which is forced to
        end, where nothing may be raised in the midst of Python's own modules.
        """
        if self._running == self._target == request and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, signal.SIGINT)

    def force(self, request: int) -> bool:
        """From another thread: end that request, whatever it catches; whether it still runs."""
        if self._main.ident is None or not forced_end.force(lambda: self._running == request):
            return False
        signal.pthread_kill(self._main.ident, signal.SIGINT)  # out of what sleeps
        return True

    def fate(self) -> str:
        """From another thread: what the code that runs has made of an interrupt.

        Returns:
            It, such as ``"its code caught the interrupt at In[2] line 4"``; empty if there was
            none, or while it is on its way.
        """
        if not self._running or self._running != self._asked:
            return ""
        if text := self._handler_text():
            return text
        raised = self._raised
        return "" if raised is None or self.is_pending else caught_text(raised)

    def _handler_text(self) -> str:
        """What else than to raise happens at SIGINT."""
        handler = signal.getsignal(signal.SIGINT)
        if handler in (self.on_signal, forced_end.on_signal) or awaiting() is not None:
            return ""  # while a cell awaits, asyncio has its own
        if handler == signal.SIG_IGN:
            return "its code ignores SIGINT, by which it would be interrupted"
        code = getattr(handler, "__code__", None)
        where = f" at {line_name(code.co_filename, code.co_firstlineno)}" if code else ""
        name = getattr(handler, "__name__", str(handler))
        return f"its code handles SIGINT itself, by {name}{where}"

    def on_signal(self, _number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT."""
        is_first, self._is_handling = not self._is_handling, True
        try:
            if not is_first or self._passes(frame):
                for _ in COME_AGAIN():
                    break
        finally:
            self._is_handling = not is_first

    def _passes(self, frame: FrameType | None) -> bool:
        """Raise, or say whether it is to come again at once."""
        if not self.is_pending or self._waits_for_import(frame) or whole_writes.hold(frame):
            self._passed_at = None
        elif self._passed_at is None:
            self._passed_at = time.monotonic()
            self.request_repeat()
        elif not _is_in_context_code(frame) or self._has_waited_long():
            self._passed_at = None
            self._raise()
        return self._passed_at is not None

    def _has_waited_long(self) -> bool:
        return self._passed_at is None or time.monotonic() > self._passed_at + CONTEXT_GRACE_S

    def _raise(self) -> None:
        request, make_error = self._error
        if self._running == request:
            self._error = (0, KeyboardInterrupt)
            raise make_error()
        self._target = 0
        self._raised = KeyboardInterrupt()
        raise self._raised

    @property
    def is_running(self) -> bool:
        """From another thread: whether user code runs, of a request or of a widget."""
        return self._running != 0

    @property
    def is_pending(self) -> bool:
        """Whether what runs is to be interrupted, and has not been yet."""
        return self._running != 0 and self._running in (self._target, self._error[0])

    def _waits_for_import(self, frame: FrameType | None) -> bool:
        if not _is_importing_library(frame):
            return False
        if self._held_since is None:
            self._held_since = time.monotonic()
        return time.monotonic() < self._held_since + IMPORT_GRACE_S

    def repeat_held(self) -> None:
        """From another thread: an interrupt that waits for the end of an import comes again."""
        if self._held_since is not None:
            self._send()

    @property
    def is_to_be_repeated(self) -> bool:
        """From another thread: whether a signal was let pass, or swallowed.

        On a busy machine a repeat may come before the handler has ended, and does not end a sleep
        that goes on only then. So it is sent until it has come to something.
        """
        return self._passed_at is not None or self._is_swallowed

    def repeat(self) -> None:
        """From another thread: send that signal again."""
        if self.is_to_be_repeated:
            self._is_swallowed = False
            self._send()

    def _send(self) -> None:
        if self.is_pending and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, signal.SIGINT)

    @property
    def is_importing(self) -> bool:
        """From another thread: whether what runs imports a library, which no interrupt cuts off."""
        return self._running != 0 and _is_importing_library(frames.innermost(self._main.ident or 0))

    def raise_in_user_code(self, make_error: Callable[[], BaseException]) -> None:
        """From another thread: raise an error in what runs, as soon as it is out of C code."""
        if self._running > 0 and self._main.ident is not None:
            self._error = self._running, make_error
            signal.pthread_kill(self._main.ident, signal.SIGINT)

    def interrupt_callback(self) -> None:
        """From another thread: interrupt a widget's callback, if one runs."""
        if self._running == CALLBACK:
            self._target = CALLBACK
            self.interrupt(CALLBACK)

    def is_swallowed(self, error: BaseException | None) -> bool:
        """Take note of what Python has printed instead of raising; whether it is raised again.

        What a signal raises within ``__del__``, or within a hook around a fork, goes no further.
        """
        if error is None or error is not self._raised:
            return False
        self._raised, self._target = None, self._running
        self._is_swallowed = True
        self.request_repeat()
        return True


def _is_in_context_code(frame: FrameType | None) -> bool:
    """Whether a library, and not code of the user's, enters or leaves a context."""
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        if frame.f_code.co_name in _CONTEXT_CODE:
            return True
        frame = frame.f_back
    return False


def _is_importing_library(frame: FrameType | None) -> bool:
    for each in frames.outward(frame):
        if each.f_code.co_name == "<module>" and not is_user_code(each.f_code.co_filename):
            spec = each.f_globals.get("__spec__")
            if getattr(spec, "_initializing", False):  # a script that runs is none of these
                return True
    return False


class Control:
    """Receives what the kernel sends past the request queue.

    Args:
        socket: Connected to the kernel's control socket. Used by this thread alone.
        interrupter: Reaches the main thread.
        handle: Called with every message; for an ``Abort``, before the interrupt.
        is_blocked: Whether the main thread waits in a collective, which the abort will free.
        abort_backend: Called with an ``Abort`` once operations under way have had time to end;
            may give what is to be called some time later.
        interrupt_children: Interrupts what a request has started, if it still runs.
        check_limits: Called now and then, to see whether a time limit is over.
        is_limited: Whether anything is under way that may have one; who begins it calls
            :meth:`watch`.
        owners: The agent says by it that there is another kernel; None where there will be none.
        set_owner: Called with each ``SetOwner``.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        interrupter: Interrupter,
        handle: Callable[[Any], None],
        is_blocked: Callable[[], bool],
        abort_backend: Callable[[Abort], Callable[[], None] | None],
        interrupt_children: Callable[[int], None],
        check_limits: Callable[[], None] = lambda: None,
        is_limited: Callable[[], bool] = lambda: False,
        owners: Connection | None = None,
        set_owner: Callable[[SetOwner], None] = lambda owner: None,
    ):
        self._owners = owners
        self._set_owner = set_owner
        self._poller = zmq.Poller()
        if owners is not None:
            self._poller.register(owners.fileno(), zmq.POLLIN)
        self._socket = socket
        self._poller.register(socket, zmq.POLLIN)
        self._interrupter = interrupter
        self._handle_message = handle
        self._is_blocked = is_blocked
        self._abort_backend = abort_backend
        self._interrupt_children = interrupt_children
        self._check_limits = check_limits
        self._is_limited = is_limited
        self._is_at_rest = False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        interrupter.request_repeat = self._wake
        self._poller.register(self._woken, zmq.POLLIN)
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self.malformed = 0
        self._thread = threading.Thread(target=self._serve, name="distsession-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def use(self, socket: zmq.Socket[bytes]) -> None:
        """From this thread: another kernel's socket takes the place of the one before."""
        self._poller.unregister(self._socket)
        self._socket.close(0)
        self._socket = socket
        self._poller.register(socket, zmq.POLLIN)

    def _receive_owner(self) -> None:
        assert self._owners is not None
        try:
            owner = self._owners.recv()
        except (EOFError, OSError):  # the agent is gone, and this process with it
            self._poller.unregister(self._owners.fileno())
        else:
            self._set_owner(owner)

    def watch(self) -> None:
        """From another thread: something is under way from here on that may have a limit."""
        if self._is_at_rest:
            self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _timeout_ms(self) -> int | None:
        """How long nothing need be done unless something comes; None for ever."""
        if self._timers:
            wait_s = min(at for at, _ in self._timers) - time.monotonic()
            return min(CHECK_EVERY_MS, max(0, math.ceil(1000 * wait_s)))
        self._is_at_rest = True  # first said, then looked at: see watch()
        self._is_at_rest = not self._is_limited()
        return None if self._is_at_rest else CHECK_EVERY_MS

    def _serve(self) -> None:
        checked = time.monotonic()
        while True:
            ready = dict(self._poller.poll(self._timeout_ms()))
            if self._woken in ready:
                os.eventfd_read(self._woken)
                if self._interrupter.is_to_be_repeated:
                    self._schedule(REPEAT_S, lambda: self._repeat(REPEAT_S))
            if self._owners is not None and self._owners.fileno() in ready:
                self._safely(self._receive_owner)
            elif self._socket in ready:
                self._safely(self._receive)
            now = time.monotonic()
            if 1000 * (now - checked) >= CHECK_EVERY_MS:
                checked = now
                self._safely(self._check_limits)
            due = [action for at, action in self._timers if at <= now]
            self._timers = [(at, action) for at, action in self._timers if at > now]
            for action in due:
                self._safely(action)

    def _receive(self) -> None:
        try:
            message, _ = decode(receive(self._socket))
        except zmq.Again:  # it was a stranger's
            return
        except MalformedMessage as error:
            self.malformed += 1
            log.warning("dropped a malformed message: %s", error)
            return
        self._handle(message)

    @staticmethod
    def _safely(action: Callable[..., object], *args: Any) -> None:
        """This thread must go on, whatever happens."""
        try:
            action(*args)
        except Exception:
            log.exception("could not do what was asked: %r", args)

    def _handle(self, message: Any) -> None:
        if not isinstance(message, Abort):
            self._handle_message(message)
            return
        if message.interrupt or message.refuse:
            self._interrupter.interrupt_callback()
        blocked = self._is_blocked()
        if message.interrupt:
            self._interrupter.target(message.interrupt)
        self._handle_message(message)
        self._schedule(ABORT_GRACE_S, lambda: self._free(message, IMPORT_GRACE_S))
        self._schedule(ABORT_GRACE_S + IMPORT_POLL_S, self._interrupt_after_import)
        if not message.interrupt:
            return
        if message.force:
            self._schedule(ABORT_GRACE_S + FREED_GRACE_S, lambda: self._force(message.interrupt))
            return
        if blocked:  # it will be free in a moment; a signal then would be one too many
            self._schedule(
                ABORT_GRACE_S + FREED_GRACE_S,
                lambda: self._interrupter.interrupt(message.interrupt),
            )
            self._schedule(
                ABORT_GRACE_S + FREED_GRACE_S + INTERRUPT_RETRY_S,
                lambda: self._interrupt_again(message.interrupt),
            )
        else:
            self._interrupter.interrupt(message.interrupt)
            self._schedule(INTERRUPT_RETRY_S, lambda: self._interrupt_again(message.interrupt))

    def _free(self, message: Abort, import_s: float) -> None:
        """Let what waits in collectives go on, once it can be interrupted.

        While a library is imported it cannot. Freed then, the code behind the import would go on
        with what no collective has given, until the interrupt comes again.

        Args:
            message: Why.
            import_s: Seconds for which an import is waited for.
        """
        is_importing = self._interrupter.is_importing and not self._is_blocked()
        if is_importing and import_s > 0:
            self._schedule(IMPORT_POLL_S, lambda: self._free(message, import_s - IMPORT_POLL_S))
            return
        self._interrupter.repeat_held()  # before it is freed
        if (again := self._abort_backend(message)) is not None:
            self._schedule(STUCK_AFTER_S, again)

    def _force(self, request: int) -> None:
        """End it, and what it waits for."""
        if self._interrupter.force(request):
            self._interrupt_children(request)
            self._schedule(FORCE_EVERY_S, lambda: self._force(request))

    def _interrupt_again(self, request: int) -> None:
        """The main thread may wait for a process that it has started: that is interrupted, too."""
        self._interrupter.interrupt(request)
        self._interrupt_children(request)

    def _repeat(self, paused_s: float) -> None:
        self._interrupter.repeat()
        if self._interrupter.is_to_be_repeated:
            pause_s = min(2 * paused_s, LONGEST_REPEAT_S)
            self._schedule(pause_s, lambda: self._repeat(pause_s))

    def _interrupt_after_import(self) -> None:
        if self._interrupter.is_pending:
            self._interrupter.repeat_held()
            self._schedule(IMPORT_POLL_S, self._interrupt_after_import)

    def _schedule(self, seconds: float, action: Callable[[], object]) -> None:
        self._timers.append((time.monotonic() + seconds, action))
