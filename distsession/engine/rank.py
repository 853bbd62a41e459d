"""The process of one rank, from the fork to its end.

The main thread runs the user's code; between requests it runs the event loop of ipyparallel's
engine. User code therefore never finds a running event loop, as in a script. Two side threads
never run user code: control (answers while the main thread is busy) and output.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch.distributed as dist

from distsession.engine import (
    cause,
    device_errors,
    device_ipc,
    failure,
    frames,
    guarded,
    process_group,
    process_limit,
    store,
    tensors,
)
from distsession.engine.capture import Capture
from distsession.engine.collectives import abort, in_flight, torch_changes, torch_private
from distsession.engine.collectives.group import Groups
from distsession.engine.collectives.hooked import HookedGroups
from distsession.engine.collectives.recorder import Recorder
from distsession.engine.collectives.torch_changes import Part
from distsession.engine.comms import Comms
from distsession.engine.completion import CompletionServer
from distsession.engine.control import CALLBACK, Control, Interrupter
from distsession.engine.deaths import LastLine, catch_faults
from distsession.engine.debugger import Debugger
from distsession.engine.event_loop import RankLoop
from distsession.engine.execute import NOTHING, awaiting
from distsession.engine.forced_end import ForcedEnd
from distsession.engine.forks import Forks, launch_error, make_private, spawn_hint
from distsession.engine.imports import LONG_S, ImportWatch
from distsession.engine.ipython import (
    ShellFront,
    make_shell,
    new_namespace,
    silent_debugger,
)
from distsession.engine.kernel_link import KernelLink, Received
from distsession.engine.left_threads import LeftThreads
from distsession.engine.listeners import is_run, told
from distsession.engine.log_file import log_path
from distsession.engine.mappings import Mappings
from distsession.engine.namespace import rank_names
from distsession.engine.process import (
    interrupt_children,
    pass_over_inherited_finalizers,
    redirect_standard_streams,
    started_at,
)
from distsession.engine.rendezvous import WITHOUT_GROUP, UserGroups
from distsession.engine.requests import RequestDispatcher
from distsession.engine.signals import UserHandlers
from distsession.engine.stdin import RankStdin
from distsession.engine.timeline import Trace
from distsession.engine.torch_errors import is_from_gloo, is_without_group
from distsession.errors import CollectiveError, SerializationError, SessionStateError
from distsession.protocol import attach, serialize, shared_memory
from distsession.protocol import board as layout
from distsession.protocol.agent_messages import StartRanks
from distsession.protocol.board import Board
from distsession.protocol.messages import (
    Abort,
    Buffered,
    CommInput,
    CompletionRequest,
    ControllerInfo,
    DebugRequest,
    EngineRegistered,
    FillRequest,
    InputReply,
    PullRequest,
    RankAttached,
    RankFailed,
    RankReady,
    ReconnectRequest,
    Reply,
    Request,
    Resume,
    ReturnRequest,
    Shared,
    StackReply,
    StackRequest,
)
from distsession.protocol.rank_state import AbortReason
from distsession.protocol.shared_memory import Segment
from distsession.protocol.tensor_memory import in_memory
from distsession.ranks import RankInfo

__all__ = ["begin", "main"]

log = logging.getLogger(__name__)

REQUEST_POLL_MS = 3
"""How long to wait for the next request before ipyparallel's event loop gets its turn: a request
that follows at once is then served without the cost of entering and leaving that loop."""

PUSHED_POLL_MS = 1, 50
"""The shortest and longest time between two looks at whether what was staged is committed, while
no request comes, which looks by itself."""
PUSHED_WAIT_S = 0.2
"""Seconds that completion waits for an idle rank to set what is committed."""

NATIVE_MARK = "groups-of-torch"
"""A file in the session's folder, once its ranks have left their groups to torch."""

STILL_S = 1.0
"""Seconds at one call after which the main thread counts as held up by its device."""

OWN_THREADS = (
    "distsession-control",
    "distsession-output",
    "distsession-completion",
    "distsession-abort",
)
"""Those that never wait for another rank."""

NO_CODE = contextlib.nullcontext()


class _Terminated(SystemExit):
    """Raised by SIGTERM: leave, running exit functions. asyncio passes it on out of a callback."""


def main(
    start: StartRanks,
    rank: int,
    *,
    store_port: int,
    memory: mmap.mmap,
    owners: Connection | None = None,
) -> None:
    """Be this rank until the agent ends it.

    Args:
        start: What the kernel wants.
        rank: Which.
        store_port: Of the rendezvous store.
        memory: Shared with the agent, for the line that this rank is at.
        owners: Tells whose sockets to connect to, where the session is kept.
    """
    _make(start, rank, store_port, memory, owners).serve()


def begin(start: StartRanks, rank: int, *, memory: mmap.mmap) -> None:
    """Do what this rank does until it has something to do, and then no more; see ``main``."""
    _make(start, rank, 0, memory, None).begin()


def _make(
    start: StartRanks,
    rank: int,
    store_port: int,
    memory: mmap.mmap,
    owners: Connection | None,
) -> Rank:
    out, err = (log_path(start.folder, rank, start.generation, s) for s in ("out", "err"))
    redirect_standard_streams(out, err)
    end_catching = catch_faults(log_path(start.folder, rank, start.generation, "fault"))
    last_line = LastLine(memory)
    return Rank(start, rank, store_port, (out, err), last_line, end_catching, owners)


class Rank:
    """The parts of a rank's process."""

    def __init__(
        self,
        start: StartRanks,
        rank: int,
        store_port: int,
        paths: tuple[str, str],
        last_line: LastLine,
        end_catching: Callable[[], None],
        owners: Connection | None,
    ):
        self._last_line = last_line
        self._forked_in = self._generation = start.generation
        self._place = process_group.prepare(start, rank, store_port)
        self._rank = rank
        self._is_alone = start.is_whole
        self._board = Board(start.board, start.world_size)
        self._board.regions[rank].set_process(os.getpid(), started_at(os.getpid()))
        self._recorder = Recorder(
            self._board,
            rank,
            check=start.check in ("shared", "strict"),
            here=None if start.is_board_shared else start.here,
        )
        self._recorder.reset()
        last_line.share(self._recorder.region)
        self._groups: Groups | None = None
        self._hooked: HookedGroups | None = None
        """Records what groups of torch's own do, where there are none of ours."""
        self._has_gloo = "gloo" in start.backend
        self._folder = start.folder
        self._native_mark = os.path.join(start.folder, NATIVE_MARK)
        if os.path.exists(self._native_mark):
            self._leave_groups_to_torch()
        is_gloo = process_group.is_gloo(start.backend)
        if start.groups == "torch":
            torch_private.leave_groups_to_torch()
        elif torch_changes.is_usable(Part.GROUPS):
            self._groups = Groups(
                self._recorder,
                detail=start.check == "detail",
                strict=start.check == "strict",
                session=self._place.session,
            )
        if self._groups is None:
            self._follow_groups()
        if start.check == "detail" and (self._groups is None or not is_gloo):
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        self._store = store.session_store(self._place.store_path)
        abort.bind_listener_stand_in(start.folder)
        self._store.abort_error = self._abort_error
        if start.check == "strict" and not start.is_board_shared:
            self._recorder.compare_far = self._compare_far
        if self._groups is not None:
            self._store.record_wait = self._groups.record_store_wait
        self._user_groups = UserGroups(self._place, self._recorder, self._groups)
        self._imports = ImportWatch()
        self._left_threads = LeftThreads(OWN_THREADS)
        self._cpp_warnings = torch_private.CppWarnings()
        is_recorded = self._groups is not None or self._hooked is not None
        self._trace = Trace(rank, self._recorder if is_recorded else None)
        self._group_lock = threading.Lock()
        self._still: tuple[int, float] = 0, 0.0
        """The call at which the main thread was when a limit was over, and since when."""
        self._aborted: Abort | None = None
        self._refused: set[int] = set()
        self._thread_error: BaseException | None = None
        """What ended a thread of the user's, within a collective, while the present request ran."""
        self._link = KernelLink(start, rank, self._board, self._wake_loop)
        self._memory: shared_memory.Link | None = None
        self._info: RankInfo | None = None
        self._terminated: BaseException | None = None
        self._capture = Capture(
            rank,
            paths,
            start.keep_output,
            self._link.send_output,
            lambda: self._on_pump(last_line),
            self._acknowledged if owners is not None else None,
            self._recorder.region.set_log_begins,
        )
        sys.stdout, sys.stderr = self._capture.streams
        sys.__stdout__, sys.__stderr__ = self._capture.streams  # type: ignore[misc,assignment]
        self._interrupter = Interrupter()
        guarded.install(self._interrupter.limited, _Terminated)
        self._control = Control(
            self._link.control,
            self._interrupter,
            self._handle_control,
            lambda: self._recorder.is_blocked,
            self._abort_backend,
            self._interrupt_children,
            self._check_limits,
            lambda: self._recorder.is_limited,
            owners,
            self._set_owner,
        )
        self._recorder.on_limited = self._control.watch
        self._loop = RankLoop()
        asyncio.set_event_loop(self._loop)
        self._idle: asyncio.Future[None] | None = None
        self._comms = Comms(
            rank,
            start.generation,
            self._capture,
            self._wake_loop,
        )
        self._namespace = new_namespace()
        self._completion = CompletionServer(
            self._namespace, rank, self._send, self._wait_for_pushed
        )
        self._front: ShellFront
        self._dispatcher: RequestDispatcher
        self._on_begin: Sequence[Callable[[Request], None]] = ()
        self._on_code_end: Sequence[Callable[[Request, BaseException | None], None]] = ()
        self._on_end: Sequence[Callable[[Request], None]] = ()
        self._stdin = RankStdin(rank, self._capture, self._recorder)
        self._capture.is_open_question = self._stdin.is_open
        self._debugger = Debugger(
            self._stdin, self._recorder, self._capture.streams[0], self._namespace
        )
        serialize.use_reducer(tensors.Tensors)
        tensors.set_home(self._place.device)
        self._loans = device_ipc.Loans()
        self._mappings = Mappings()
        self._handlers = UserHandlers(_Terminated, self._on_terminate, lambda: self._forks.is_child)
        self._forks = Forks(
            {
                signal.SIGTERM: (self._on_terminate, signal.SIG_DFL),
                signal.SIGINT: (self._interrupter.on_signal, signal.default_int_handler),
            },
            (
                make_private(self._recorder.words, start.board),
                self._leave_group_to_rank,
                self._capture.become_child,
                last_line.uninstall,
                end_catching,
            ),
        )

    def serve(self) -> None:
        self._install()
        try:
            try:
                self._join()
            except Exception as error:
                told, limit = failure.describe(error), process_limit.refusal(str(error))
                self._send(RankFailed(self._rank, self._generation, told, limit))
                time.sleep(0.2)  # let the message out; the session ends us anyway
                return
            self._get_ready()
            while True:
                self._handle_request(self._next_request())
        except _Terminated as terminated:
            # Its frames stay, or asyncio prints that a wait which was just begun is destroyed.
            self._terminated = terminated
        finally:
            self._leave()

    def begin(self) -> None:
        """As ``serve``, without a request."""
        self._install()
        self._join()
        self._get_ready()

    def _install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._handlers.install()
        self._forks.install()
        self._last_line.install()
        sys.unraisablehook = self._on_unraisable
        self._capture.start()

    def _get_ready(self) -> None:
        self._announce()
        self._user_groups.begin_generation(self._generation)
        self._user_groups.install()
        self._make_namespace()
        self._control.start()

    def _join(self) -> None:
        try:
            process_group.join(self._place, self._generation, self._groups, alone=self._is_alone)
        except (AttributeError, TypeError, RuntimeError) as error:
            # All ranks come to the same, if it is what a new torch says of a group such as ours.
            is_of_torch = not isinstance(error, CollectiveError) and not is_from_gloo(str(error))
            may_be_change = is_of_torch and self._is_alone and torch_changes.is_untried()
            if self._groups is None or not may_be_change:
                raise
            log.exception("torch is left to make its own groups")
            with open(self._native_mark, "w"):  # for ranks that are started later
                self._leave_groups_to_torch()
            process_group.join(self._place, self._generation, alone=self._is_alone)

    def _leave_groups_to_torch(self) -> None:
        torch_changes.turn_off(Part.GROUPS, "way to make a process group")
        torch_private.leave_groups_to_torch()
        self._groups = None
        self._follow_groups()

    def _follow_groups(self) -> None:
        """Record what torch's own groups do, if this torch has hooks for that."""
        if torch_changes.has_hooks() and self._hooked is None:
            self._hooked = HookedGroups(self._recorder)
            self._hooked.begin_generation(self._generation)

    def _on_terminate(self, _number: int, frame: FrameType | None) -> None:
        self._last_line.note_terminated(frame)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """What Python cannot raise it prints; a Stop that it swallows so is raised again."""
        if isinstance(unraisable.exc_value, _Terminated) and not self._forks.is_child:
            signal.signal(signal.SIGTERM, self._on_terminate)
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        elif isinstance(unraisable.exc_value, ForcedEnd):
            pass  # it comes again
        elif not self._interrupter.is_swallowed(unraisable.exc_value):
            sys.__unraisablehook__(unraisable)

    def _leave(self) -> None:
        if self._forks.is_child:
            os._exit(1)
        self._link.is_leaving = True
        with contextlib.suppress(Exception):
            pass_over_inherited_finalizers()
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            self._capture.flush()

    def _leave_group_to_rank(self) -> None:
        """In a forked process: collectives would go through connections that the rank uses."""
        text = (
            f"this process was forked from rank {self._rank} and is no member of its process "
            "group: call collectives on the rank itself, or start the process with "
            "multiprocessing's 'spawn' and let it make a group of its own."
        )
        self._recorder.abort = Abort(AbortReason.FORKED, text, self._generation)
        self._user_groups.become_child(text)

    def _announce(self) -> None:
        self._info = process_group.rank_info(self._place, self._generation)
        self._send(RankReady(self._rank, self._info))
        if self._groups is not None:  # after that, for which somebody waits
            process_group.forget_earlier(self._place, self._generation)

    def _make_namespace(self) -> None:
        place = self._place
        self._front = make_shell(
            self._namespace, self._capture, self._rank, self._comms, self._folder
        )
        self._namespace.update(
            rank_names(place.rank, place.local_rank, place.world_size, place.device)
        )
        self._dispatcher = RequestDispatcher(
            self._rank,
            self._namespace,
            self._front,
            self._trace,
            self,
            around=self._debugger,
            extra={
                ReconnectRequest: self._reconnect,
                DebugRequest: lambda _: self._debugger.post_mortem(),
                ReturnRequest: lambda _: self._loans.end(),
            },
            board=self._board,
        )
        listeners = (
            self._capture,
            self._handlers,
            self._recorder,
            self._last_line,
            self._imports,
            self._stdin,
            self._debugger,
            self._trace,
            self._user_groups,
            *((self._hooked,) if self._hooked is not None else ()),
            self._cpp_warnings,
            self._left_threads,
        )
        self._on_begin = told(listeners, "begin_request")
        self._on_code_end = told(reversed(listeners), "end_code")
        self._on_end = told(reversed(listeners), "end_request")
        threading.excepthook = self._on_thread_error
        self._stdin.install()
        self._debugger.install(self._interrupter.on_signal)

    def _on_thread_error(self, ended: threading.ExceptHookArgs) -> None:
        """A thread of the user's has failed: Python only prints that, and the ranks may differ."""
        error = ended.exc_value
        if error is not None and cause.find(error, self._recorder.abort) is not None:
            self._thread_error = self._thread_error or error
        threading.__excepthook__(ended)

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, message: Any) -> None:
        self._link.send(message)

    def _next_request(self) -> Received:
        look_ms = PUSHED_POLL_MS[0]
        while True:
            is_staged = self._dispatcher.transfers.commit_pushed()
            self._mappings.tidy()
            self._comms.handle(self._callback)
            is_used = self._loop.is_used
            if not (self._link.has_request() if is_used else self._link.holds_request):
                if is_staged and is_used:
                    self._loop.run_until_complete(asyncio.sleep(look_ms / 1000))
                elif not is_used:
                    timeout_ms = look_ms if is_staged else None
                    if self._loop.wait_outside(self._link.descriptor, timeout_ms) and (
                        received := self._link.receive_request()
                    ):
                        return received
                elif not self._link.poll_request(REQUEST_POLL_MS):
                    self._loop.run_until_complete(self._await_request())
                look_ms = min(2 * look_ms, PUSHED_POLL_MS[1])
                continue
            received = self._link.receive_request()
            if received is not None:
                return received

    @contextlib.contextmanager
    def _callback(self) -> Iterator[None]:
        """A widget's callback runs within, outside of the event loop."""
        try:
            self._loans.touch()
            with self._interrupter.user_code(CALLBACK):
                yield
        except BaseException as error:
            self._forks.end_child(error)
            raise
        self._forks.end_child()

    async def _await_request(self) -> None:
        """Let the event loop run until a request is there, or something for a comm."""
        while not self._link.has_request() and not self._comms.has_input:
            self._idle = self._loop.create_future()
            descriptor = self._link.descriptor
            self._loop.add_reader(descriptor, self._end_idle)
            try:
                if not self._link.has_request() and not self._comms.has_input:
                    await self._idle
            finally:
                self._loop.remove_reader(descriptor)
                self._idle = None

    def _wait_for_pushed(self) -> None:
        """From another thread: wait until names are set that an idle rank is about to set."""
        deadline = time.monotonic() + PUSHED_WAIT_S
        while self._dispatcher.transfers.is_pushed and not self._recorder.region.request:
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def _end_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _wake_loop(self) -> None:
        """From another thread: there is something else to look at than the requests' socket."""
        self._loop.wake()
        if self._loop.is_used:
            self._loop.call_soon_threadsafe(self._end_idle)

    # --- requests ---------------------------------------------------------------------------------

    def _handle_request(self, received: Received) -> None:
        request, payload, self._memory = received.request, received.payload, received.memory
        if request.id in self._refused:
            self._refuse(received)
            return
        if not isinstance(request, ReturnRequest):
            self._loans.touch()
        for begin in self._on_begin:
            begin(request)
        began = time.perf_counter()
        was_cut_off = self._recorder.region.is_cut_off  # an earlier request, which has failed
        self._thread_error = None
        answer: serialize.Frames | Segment = []
        shown = error = reason = None
        try:
            with self._interrupter.user_code(request.id):
                if request.id in self._refused:  # since it was begun, which the kernel sees
                    raise KeyboardInterrupt
                with self._handlers.user_code() if is_run(request) else NO_CODE:
                    value, shown = self._dispatcher.perform(request, payload)
                recorder = self._recorder
                if recorder.region.is_cut_off and not was_cut_off and recorder.abort is not None:
                    # However it came out of the wait: it was computed from what had not come.
                    raise recorder.abort_error()
                self._forks.end_child()
                del payload
                duration = time.perf_counter() - began
                # None, which most functions return, needs no frames.
                if value is not NOTHING and value is not None:
                    answer = self._pack(request, value)
        except _Terminated:
            raise
        except BaseException as raised:
            self._forks.end_child(raised)
            duration = time.perf_counter() - began
            error, shown = self._explain(raised), None
            reason = cause.find(error, self._recorder.abort)
        if error is None and self._thread_error is not None and is_run(request):
            error, shown, answer = self._thread_error, None, []
            reason = cause.find(error, self._recorder.abort)
        self._interrupter.leave()  # where an interrupt has come in the midst of just that
        for end in self._on_code_end:
            end(request, error)
        info = own = None
        if error is None:
            reason = self._recorder.raised  # which the code has caught
        else:
            info = failure.describe(error)
            handled = cause.find_handled(error, self._recorder.abort)
            own = None if handled is None else failure.describe(handled)
            answer = failure.pickled(error, handled)
            if not (is_run(request) and self._debugger.keep_error(error)):
                failure.forget_frames(error)  # what ends with them may take long, and is told
        for leave in self._on_end:
            leave(request)
        self._mappings.tidy()  # so that the next payload finds this one's memory
        reply = Reply(
            request.id,
            self._rank,
            duration,
            info,
            shown,
            self._capture.has_output,
            reason,
            self._imports.long() if duration >= LONG_S else (),
            own,
        )
        self._link.answer(received, reply, answer)

    def _explain(self, raised: BaseException) -> BaseException:
        """What ended the user's code; where C++ waited, as in a backward, why gloo broke off."""
        return guarded.guarded(lambda: self._explained(raised), lambda _: raised)

    def _explained(self, raised: BaseException) -> BaseException:
        if explained := launch_error(raised):
            return explained
        for part in cause.chain(raised):
            if cause.has_reason(part):
                break
            if is_from_gloo(failure.message_of(part)):
                explained = self._recorder.explain(part)
                if part is raised and explained is not raised:
                    explained.__context__ = raised.__context__
                    return explained
            elif is_without_group(failure.message_of(part)) and not dist.is_initialized():
                raised.add_note(WITHOUT_GROUP)
        if hint := spawn_hint(raised):
            raised.add_note(hint)
        if isinstance(raised, Exception) and (
            lost := device_errors.lost_text(self._rank, self._place.device)
        ):
            raised.add_note(lost)
            self._recorder.region.set_damaged(layout.DEVICE_LOST)
        return raised

    # --- payloads ---------------------------------------------------------------------------------

    @property
    def _payload_link(self) -> shared_memory.Link:
        """The link of the kernel that has sent the present request."""
        assert self._memory is not None
        return self._memory

    def read_private(self, payload: Any) -> Any:
        """The frames of a request, wherever they are."""
        if not isinstance(payload, (Shared, Buffered)):
            return payload
        try:
            if isinstance(payload, Buffered):
                return self._payload_link.copy(payload)
            with self._payload_link.receive(payload) as handed:
                return self._mappings.map(handed, payload.sizes)
        except OSError as error:
            raise SessionStateError(
                f"what was sent did not arrive on rank {self._rank}: {error}. Send it again."
            ) from error

    def map_whole(self, payload: Any) -> Any:
        """Memory of all ranks of this host; None where the payload has come from another host."""
        if not isinstance(payload, Shared):
            return None
        with self._payload_link.receive(payload) as handed:
            (whole,) = shared_memory.map_shared(handed.descriptor, payload.sizes)
        return whole

    def _pack(self, request: Request, value: Any) -> serialize.Frames | Segment:
        """A value as frames, or in shared memory if it is large."""
        began = time.monotonic_ns()
        lend = None
        if isinstance(request, PullRequest) and request.lend:
            self._loans.begin()
            lend = self._loans.lend
        try:
            frames = serialize.dump_value(
                value,
                what="the result",
                named=isinstance(request, PullRequest),
                may_be_remote=True,
                lend=lend,
                for_ranks=isinstance(request, PullRequest) and request.for_ranks,
            )
        except SerializationError as error:  # its frames are ours, and explain nothing
            raise error.with_traceback(None) from None
        size = shared_memory.nbytes(frames)
        try:
            offered = shared_memory.offer(frames, self._note_progress)
            return [in_memory(frame) for frame in frames] if offered is None else offered
        finally:
            self._note_progress(0, 0)
            if not isinstance(request, FillRequest):  # which only says where a part belongs
                self._trace.moved(request, size, began)

    def _note_progress(self, done: int, total: int) -> None:
        """Where the kernel sees how much of a large result has been written."""
        start = self._recorder.region.start
        self._recorder.words[start + layout.WRITTEN] = done
        self._recorder.words[start + layout.TO_WRITE] = total

    # --- the process group ------------------------------------------------------------------------

    def _reconnect(self, request: ReconnectRequest) -> Any:
        is_given_back = False
        with self._group_lock:  # an abort of the generation before comes too late from here on
            self._refused.discard(request.id)
            if self._aborted is not None and self._aborted.generation >= request.generation:
                raise CollectiveError(self._aborted.text)  # given up before it began here
            is_kept = bool(request.begun)
            if is_kept and not process_group.can_keep(
                self._place, self._groups, request.begun[self._rank]
            ):
                raise CollectiveError("something has begun meanwhile")
            self._generation = request.generation
            self._recorder.reset()
            self._user_groups.begin_generation(request.generation)
            if self._hooked is not None:
                self._hooked.begin_generation(request.generation)
        if is_kept and self._groups is not None:
            self._keep(self._groups)
        else:
            is_given_back = process_group.join(
                self._place,
                request.generation,
                self._groups,
                alone=False,
                timeout=request.timeout,
            )
        self._user_groups.is_given_back = is_given_back
        self._announce()
        return NOTHING

    def _keep(self, groups: Groups) -> None:
        try:
            process_group.keep(self._place, self._generation, groups)
        except BaseException:
            self._recorder.connections.lose()
            raise

    def _abort(self, message: Abort) -> None:
        """From the control thread: no operation of this generation is to begin any more."""
        self._refused.update(message.refuse)
        with self._group_lock:
            if message.generation >= self._generation:
                self._aborted = self._recorder.abort = message
                self._recorder.aborted.open()
                if self._rank in message.stuck and self._recorder.in_flight.is_on_device:
                    self._cut_off(message)  # at once: the others come free at other moments
                self._store.end_waits()

    def _compare_far(
        self, operation: str, count: int, value: int, says: str, timeout: float | None
    ) -> Mapping[int, str]:
        """Compare an operation with ranks of other hosts, by the store that all have."""
        key = f"strict/{self._generation}/{operation}"
        return self._store.compare(key, self._rank, count, value, says, timeout)

    def _abort_error(self) -> BaseException | None:
        """What a wait for a key of the store raises once the group has been given up."""
        if self._recorder.abort is None:
            return None
        error = self._recorder.abort_error()
        is_ours = self._recorder.is_main_thread or isinstance(error, Exception)
        return error if is_ours else CollectiveError(str(error))

    def _abort_backend(self, message: Abort) -> Callable[[], None] | None:
        """From the control thread: abort whatever the main thread waits in.

        Nothing says so to who waits for a device: it would go on, with what was not computed. So
        that is raised there, and waits there before the device is free.

        Returns:
            What to do in a while, where gloo's connections were left as they are.
        """
        again = None
        with self._group_lock:
            if message.generation < self._generation:  # it has been connected anew already
                return None
            self._recorder.note_completed()
            self._cpp_warnings.mute()
            # Before it is freed, or it might have gone on with what was not computed, to its end.
            recorder = self._recorder
            is_cut_off = recorder.in_flight.is_on_device or recorder.unseen.is_replaying
            if is_cut_off:
                self._cut_off(message)
            recorder.region.note_abort()
            if self._groups is not None:
                self._groups.abort()
            elif not process_group.is_gloo(self._place.backend):  # gloo's would wait for its works
                abort.abort_communicators()
            self._store.end_waits()
            if not self._is_at_rest():  # with many ranks the sockets are many, and looked at each
                if self._has_gloo and self._recorder.connections.give_up():
                    abort.abort_gloo()
                elif self._has_gloo:
                    again = partial(self._abort_stuck, message, _stands_at())
                abort.abort_store(self._place.store_port)
            self._recorder.in_flight.clear()
            self._recorder.unseen.reset()
        return again

    def _abort_stuck(self, message: Abort, stood_at: tuple[int, int]) -> None:
        """From the control thread, later: the main thread does not come back from one call.

        It, or a thread of the user's, may wait in a group that user code has made of torch's
        classes, past ours.
        """
        with self._group_lock:
            is_over = message.generation < self._generation or self._is_idle()
            # It leaves a meeting of ours by itself, but on a busy machine it may not have run yet.
            if not (is_over or self._recorder.is_blocked) and _stands_at() == stood_at:
                self._recorder.connections.lose()
                abort.abort_gloo()

    def _is_at_rest(self) -> bool:
        """From the control thread: whether nothing of this process can be waiting for a peer."""
        recorder = self._recorder
        return self._is_idle() and not (recorder.in_flight or recorder.region.operations())

    def _is_idle(self) -> bool:
        """From the control thread: whether no thread that runs user code has anything to do."""
        if self._recorder.region.request or self._interrupter.is_running:
            return False
        own = {t.ident for t in threading.enumerate() if t.name in OWN_THREADS}
        return frames.threads() <= own | {threading.main_thread().ident}

    def _cut_off(self, message: Abort) -> None:
        """From the control thread: what the main thread waits for is not what it will get."""
        region = self._recorder.region
        if region.is_cut_off:
            return
        region.set_damaged(layout.CUT_OFF)
        if message.reason is not AbortReason.STOP:
            self._interrupter.raise_in_user_code(self._recorder.abort_error)

    def _check_limits(self) -> None:
        """From the control thread: end a wait for a device that lasts longer than it may.

        A backend that works on the CPU ends its own.
        """
        recorder = self._recorder
        overdue = recorder.find_overdue()
        if overdue is None:
            self._still = 0, 0.0
            return
        if not (recorder.is_blocked or self._is_held_up()):
            return  # it has not come to where it needs that
        message = recorder.give_up(overdue, self._generation)
        self._abort(message)
        self._abort_backend(message)

    def _is_held_up(self) -> bool:
        """Whether the main thread waits for the device, or stands at one call for long."""
        if not self._recorder.region.request:
            return False
        if self._is_device_wait():
            return True
        at, now = in_flight.instruction(_innermost()), time.monotonic()
        if not at or at != self._still[0]:
            self._still = at, now
            return False
        return now - self._still[1] >= STILL_S

    def _interrupt_children(self, request: int) -> None:
        """From the control thread: also once the user's code is over, and what it had is let go.

        A ``DataLoader`` then waits for its workers, ten seconds for two that are stuck.
        """
        region = self._recorder.region
        if region.request == request:
            interrupt_children(region.seconds)

    def _refuse(self, received: Received) -> None:
        request = received.request
        self._refused.discard(request.id)
        if isinstance(received.payload, Shared):
            received.memory.discard(received.payload)
        error = SessionStateError(
            "this was not run: it waited behind a run that was stopped, or was stopped itself "
            "before it began. Run it again if it is still wanted."
        )
        reply = Reply(request.id, self._rank, 0.0, failure.describe(error))
        self._link.answer(received, reply, failure.pickled(error))

    # --- the control thread -----------------------------------------------------------------------

    def _handle_control(self, message: Any) -> None:
        match message:
            case Abort():
                self._abort(message)
            case StackRequest():
                self._send(self._stack(message.number))
            case CompletionRequest():
                self._completion.submit(message)
            case CommInput():
                self._comms.put(message)
            case InputReply():
                self._stdin.put_reply(message)
            case ControllerInfo():
                self._on_controller(message)
            case Resume():
                self._resume(message)
            case _:
                log.warning("dropped a message that is not for the control thread: %r", message)

    def _stack(self, number: int) -> StackReply:
        recorder = self._recorder
        recorder.note_completed()
        if not recorder.region.request:
            has_threads = self._left_threads.are_at_work()
            return StackReply(self._rank, number, (), "", has_threads=has_threads)
        unseen = recorder.unseen
        is_device_wait = self._is_device_wait()
        stack = failure.stack(_innermost(), awaiting())
        unseen.note_completed()
        # A rank that compiles is not looked at, and is where it was before.
        place = failure.innermost(stack) if stack else self._last_line.place
        instruction = in_flight.instruction(_innermost())
        return StackReply(
            self._rank,
            number,
            stack,
            place,
            is_device_wait,
            unseen.texts(),
            instruction,
            has_one_thread=not self._left_threads.any_at_work(),
            interrupted=self._interrupter.fate(),
        )

    def _is_device_wait(self) -> bool:
        """Whether the main thread waits for the device."""
        unseen = self._recorder.unseen
        return self._recorder.in_flight.is_waited_for(
            _innermost,
            is_other_under_way=bool(unseen.texts()),
            is_device_used=unseen.is_device_used(),
        )

    # --- a kernel that goes, and one that comes: the control thread -------------------------------

    def _set_owner(self, message: attach.SetOwner) -> None:
        self._capture.detach()
        self._loans.end()  # who has asked for it will not say that it is copied
        if not message.epoch:
            self._link.detach()
            return
        before = self._link.epoch
        self._link.attach(message.epoch)
        self._control.use(self._link.control)
        assert self._info is not None
        running, queued, answered = self._link.state()
        with self._group_lock:
            generation, is_broken = self._generation, self._recorder.abort is not None
        self._send(
            RankAttached(
                rank=self._rank,
                epoch=message.epoch,
                before=before,
                info=self._info,
                forked_in=self._forked_in,
                generation=generation,
                is_broken=is_broken,
                running=running,
                queued=queued,
                answered=answered,
            )
        )

    def _resume(self, message: Resume) -> None:
        self._refused -= set(message.drop)
        self._capture.resume(lambda: setattr(self._link, "takes_output", True))
        self._link.resume(message.drop)

    def _acknowledged(self) -> int:
        return self._board.acknowledged(self._link.epoch)

    def _on_pump(self, last_line: LastLine) -> bool:
        """Called by the thread that sends the output, as it wakes; whether to call it often."""
        last_line.update()
        self._imports.update()
        self._link.forget_acknowledged()
        self._mappings.tidy()
        return self._recorder.note_wait(_innermost)

    # --- ipyparallel ------------------------------------------------------------------------------

    def _on_controller(self, info: ControllerInfo) -> None:
        """From the control thread: register as soon as the main thread is idle."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._register(info)))

    @contextlib.contextmanager
    def _client_code(self) -> Iterator[None]:
        """What ipyparallel's clients have run runs within."""
        self._loans.touch()
        self._dispatcher.transfers.commit_pushed()
        with self._handlers.user_code():
            yield

    async def _register(self, info: ControllerInfo) -> None:
        def report(engine_id: int) -> None:
            self._send(EngineRegistered(self._rank, self._generation, engine_id))

        if not info.profile_dir:
            profile = os.path.join(self._folder, f"ipyparallel-{self._rank}")
            os.makedirs(profile, mode=0o700, exist_ok=True)
            info = replace(info, profile_dir=profile)
        try:
            with silent_debugger():  # ipyparallel is imported, which few sessions use
                from distsession.engine.px_engine import register

            await register(info, self._rank, self._namespace, report, around=self._client_code)
        except _Terminated:
            raise
        except Exception as error:
            log.debug("could not register with ipyparallel's controller", exc_info=True)
            problem = f"{type(error).__name__}: {error}"
            self._send(EngineRegistered(self._rank, self._generation, -1, problem))


def _stands_at() -> tuple[int, int]:
    """Numbers that stay the same while the main thread is at one call."""
    frame = _innermost()
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def _innermost() -> FrameType | None:
    """Where the main thread is."""
    return frames.innermost(threading.main_thread().ident or 0)
