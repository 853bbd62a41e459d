"""The agent: one process per host that imports torch once and forks the host's ranks.

It stays single-threaded and never touches a zmq context, CUDA or a parallel torch operation, for
a forked child of a process that did is broken. Its only link is a socket to the kernel; when that
closes, for whatever reason, the agent ends its ranks and itself; of a session that is kept, once
nobody has attached for as long. If the kernel is gone, it removes the session's folder, too.

The file is long because one loop serves the kernel, the children and the lease, and what it does
for each uses the state of the agent.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import logging
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, NoReturn

from distsession.engine import process_limit, store_server
from distsession.engine.log_file import log_path, read_parts, read_piece, read_tail
from distsession.engine.oom import OomKills
from distsession.engine.owners import Owners
from distsession.engine.pages import Pages, use_large_pages
from distsession.engine.preload import LATER_IMPORTS, import_modules
from distsession.engine.process import (
    KeptBackFinalizers,
    die_with_parent,
    exit_after,
    signal_when_parent_ends,
    started_at,
)
from distsession.engine.process_state import RUNS, process_state, scheduled
from distsession.engine.process_watch import ProcessWatch
from distsession.protocol import attach, board_mirror, folder_lock, unix_socket, whole_messages
from distsession.protocol.agent_messages import (
    AgentFailed,
    AgentReady,
    AgentStarted,
    GpuReply,
    GpuRequest,
    LogPiece,
    LogRequest,
    PreloadReply,
    PreloadRequest,
    PrepareAgent,
    RankExited,
    RanksNotStarted,
    StartRanks,
    StopRanks,
    StoreEnded,
    StoreReady,
    UsageRequest,
)
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.board_mirror import Mirror
from distsession.protocol.kept_record import ENDED, SESSION_FILE, WAS_ENDED, note_end
from distsession.protocol.shared_memory import LinkListener
from distsession.protocol.wire import make_node_folder, memory_path, socket_path
from distsession.ranks import HostInfo, ranks_text

if TYPE_CHECKING:
    from distsession.engine.rehearsal import Rehearsal
    from distsession.engine.spares import Spare, Start

log = logging.getLogger(__name__)

PARENT_POLL_S = 0.5
"""Seconds between two looks at whether the kernel still lives."""

PRELOAD_IDLE_S = 0.3
"""Seconds without a message before the next of ``LATER_IMPORTS`` is imported."""

SPARES_AFTER_S = 1.0
"""Seconds after a start of ranks before others are forked for the next one."""
MAX_SPARES = 16
"""The most of these. A restart of more ranks than that takes long for other reasons."""
MAX_COPIED_PAGES = 8192
"""What each of them has for itself, at the most."""

LARGE_PAGES_RANKS = 4
"""With so many ranks, large pages save at a restart what they take. Until then the ranks that are
there keep the pages that they share, so it is memory for once, some 100 MB."""

ORPHANS_TIMEOUT_S = 5.0
"""Seconds that other processes of a session whose kernel is gone have to end."""

KERNEL_END_TIMEOUT_S = 0.5
"""Seconds in which a kernel whose link has closed turns out to be gone."""

EXIT_GRACE_S = 0.4
"""Seconds that a rank has to leave by itself (run its exit functions) before it is killed. Those in
which others had the processors do not count: many ranks that end together wait for one another."""
EXIT_LIMIT_S = 3.0
"""Seconds after which it is killed whatever it has waited for."""
EXIT_LOOK_S = 0.05
"""Seconds between two looks at what it has waited for."""

BESIDE_RANKS = 3
"""How many processes and threads the stores of a session have, or the relay of a node."""

RELAY_TIMEOUT_S = 2.0
"""Seconds that ranks are not forked for while the relay is not ready for them."""

RELAY_END_TIMEOUT_S = 2.5
"""Seconds that a relay has to hand on what has come before another takes its place."""

MAX_STORE_ENDS = 5
STORE_ENDS_WITHIN_S = 10.0
"""A store that ends so often in so short a time is not started again."""

LOG_TAIL_BYTES = 4000
"""Bytes of each log that are kept for the message about a death."""

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What ``faulthandler`` catches."""

HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that an agent has handlers for."""


@dataclass
class _Rank:
    rank: int
    generation: int
    folder: str
    memory: mmap.mmap
    """Where it notes the line that it is at."""
    owners: Connection | None = None
    """Tells it of another kernel, where the session is kept."""
    stopping: bool = False


@dataclass(frozen=True)
class _Trial:
    """A child that imports modules to see how that goes.

    Attributes:
        reply: What the kernel is told if it goes well.
    """

    pid: int
    modules: tuple[str, ...]
    link: Connection
    reply: PreloadReply


class Agent:
    """Forks, watches and ends the ranks of one host, or of one node that this host plays."""

    def __init__(self, link: Connection, node: int, kernel: Kernel, folder: str):
        self._link: Connection | None = link
        self._node = node
        self._kernel = kernel
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}
        self._owners: Owners | None = None
        self._has_begun = False
        """The session can be attached to."""
        self._board: Board | None = None
        self._mirror: Mirror | None = None
        self._processes: ProcessWatch
        self._board_descriptor = -1
        self._here = range(0)
        """The ranks of this node."""
        self._world_size = 0
        self._has_ranks = True
        self._is_elsewhere = False
        """This is another host than the kernel's: this process lasts as long as what started it."""
        self._has_own_board = False
        """Its ranks do not have the kernel's, so the relay brings there what stands on theirs."""
        self._ends: dict[int, RankExited] = {}
        self._store_end: StoreEnded | None = None
        self._store_pid = 0
        self._tcp_store_pid = 0
        self._store_port = 0
        self._store_ends: list[float] = []
        self._is_ending = False
        self._usage_link: Connection | None = None  # to the process that asks NVML
        self._usage_pid = 0
        self._relay_pid = 0
        self._trial: _Trial | None = None
        self._later: list[Callable[[], None]] = []
        """To be done one by one while there is nothing else to do and there are ranks."""
        self._spares: list[Spare] = []
        self._stopped: list[_Rank] = []
        """Those whose log files still have room that was reserved."""
        self._started: StartRanks | None = None
        """How the last ranks were."""
        self._rehearsal: Rehearsal | None = None
        self._pages = Pages()
        """What a rank copies and maps as it begins."""
        self._forked_at = 0.0
        self._oom_kills = OomKills()
        self._finalizers = KeptBackFinalizers()
        self._wake, wake_writer = os.pipe()
        for end in (self._wake, wake_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._wake_writer = wake_writer

    def serve(self) -> None:
        """Handle what the kernel sends until the link closes."""
        self._later[:0] = [
            *(partial(_import_quietly, name) for name in LATER_IMPORTS),
            self._prepare_for_ranks,
            self._use_large_pages,
        ]
        try:
            while not self._kernel.is_leaving and not self._is_over():  # an import may swallow it
                idle = PRELOAD_IDLE_S if self._later and self._ranks else PARENT_POLL_S
                rehearsal = None if self._rehearsal is None else self._rehearsal.link
                all_links = (self._link, self._usage_link, rehearsal)
                links = [link for link in all_links if link is not None]
                door = [] if self._owners is None else [self._owners.fileno()]
                ready = wait([*links, *door, self._wake], timeout=idle)
                if door and door[0] in ready and self._accept():
                    return
                if self._link is not None and self._link in ready and not self._receive():
                    return
                if self._wake in ready:
                    self._empty_wake()
                if self._usage_link in ready:
                    self._forward_usage()
                self._reap()
                if self._rehearsal is not None and self._rehearsal.is_over:
                    self._on_rehearsal(self._rehearsal)
                if not ready and self._later and self._ranks:
                    self._later.pop(0)()
        except (EOFError, OSError):
            log.info("the kernel has closed the link")
        finally:
            try:
                self._end()
            except SystemExit:  # a signal that came at the last moment
                self._end()

    def _receive(self) -> bool:
        """Take in a message of the kernel; False if this process is to end."""
        assert self._link is not None
        try:
            data = whole_messages.receive_bytes(self._link, whole_messages.MESSAGE_TIMEOUT_S)
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                log.warning("the kernel is given up: %s", error)
                if self._owners is not None:
                    self._owners.let_go(self._link, f"the agent has given it up, for {error}")
            if self._owners is None:
                raise
            self._on_kernel_gone()
            return True
        try:
            message = pickle.loads(data)
        except Exception:
            log.exception("dropped a malformed message of the kernel")
            return True
        return self._handle(message)

    def _handle(self, message: Any) -> bool:
        match message:
            case PrepareAgent():
                return self._prepare(message)
            case StartRanks():
                self._reap()  # a relay, or a store, may just have ended
                if self._board_descriptor < 0:
                    self._take_board(message)
                self._start(self._place(message))
            case StopRanks():
                pids = {pid for pid, rank in self._ranks.items() if rank.rank in message.ranks}
                self._stop(pids)
            case PreloadRequest():
                self._preload(message)
            case UsageRequest():
                self._request_usage(message)
            case GpuRequest():
                self._request_gpus(message)
            case LogRequest():
                self._read_log(message)
            case attach.Adopt():
                self._adopt(message.epoch)
            case _:
                log.warning("dropped a message that is not for an agent: %r", message)
        return True

    def _start(self, message: StartRanks) -> None:
        """Start what ranks need, and ranks; say so if the system does not let it."""
        if problem := self._room_problem(message):
            reason = problem
        else:
            try:
                self._start_all(message)
            except OSError as error:
                if isinstance(error, ConnectionError):  # nobody is there to be told
                    raise
                reason = f"its agent could not start all that they need: {error}."
                if error.errno == errno.EAGAIN:
                    reason = process_limit.refused()
                else:
                    log.exception("could not start the ranks")
            else:
                return
        here = {each.rank for each in self._ranks.values() if each.generation == message.generation}
        missing = tuple(rank for rank in message.ranks if rank not in here)
        self._tell(RanksNotStarted(self._node, message.generation, missing, reason))

    def _room_problem(self, message: StartRanks) -> str:
        """Why the system would not let these ranks start; empty if it would, as far as is known."""
        if not message.ranks:
            return ""
        each = process_limit.RANK_THREADS + message.threads
        beside = 0 if self._store_pid or self._relay_pid else BESIDE_RANKS
        take = "takes" if len(message.ranks) == 1 else "take"
        threads = f"{message.threads} thread{'s' * (message.threads != 1)} for computing"
        what = f"{ranks_text(message.ranks)}, with {threads} each, {take}"
        return process_limit.room_problem(each * len(message.ranks) + beside, what, each)

    def _start_all(self, message: StartRanks) -> None:
        if message.keep and self._owners is None:
            self._keep(message)
        if self._node:
            self._store_port = message.store_port
            if not self._relay_pid:
                self._start_relay(message.epoch)
        else:
            if not self._store_pid:
                self._start_store()
            if not self._tcp_store_pid:
                self._start_tcp_store(0)
        self._tell(StoreReady(self._store_port))
        if message.ranks:
            self._fork_all(message)

    def _place(self, message: StartRanks) -> StartRanks:
        """What ranks are told of where they are."""
        is_elsewhere = message.board < 0
        # The number is that of the kernel which started this process; another has its own.
        message = replace(message, board=self._board_descriptor, folder=self._folder)
        if not is_elsewhere:
            return message
        return replace(
            message,
            environ={**os.environ, **message.environ},
            cwd=message.cwd if os.path.isdir(message.cwd) else os.path.expanduser("~"),
        )

    def _tell(self, message: Any) -> None:
        """Send the kernel something, if there is one."""
        if self._link is None:
            return
        try:
            self._link.send(message)
        except OSError:
            if self._owners is None:
                raise

    # --- a session that is kept -------------------------------------------------------------------

    def _keep(self, start: StartRanks) -> None:
        self._owners = Owners(start, self._kernel.pid)
        self._kernel.is_optional = not self._is_elsewhere
        self._board = Board(self._board_descriptor, start.world_size)

    def _is_over(self) -> bool:
        """Whether nobody is there, and nobody is waited for."""
        if self._owners is None or self._is_elsewhere:
            return not self._kernel.is_alive
        # Somebody may tidy the folder away later; the ranks go on then.
        self._has_begun = self._has_begun or os.path.exists(
            os.path.join(self._folder, SESSION_FILE)
        )
        if self._link is None and not self._has_begun:
            log.warning("the kernel has ended as it started the session")
            return True
        if self._link is not None and not self._kernel.is_alive:
            # A process that it has started may still hold the other end of the link.
            self._on_kernel_gone()
        problem = self._owners.problem(self._is_idle)
        if problem:
            self._note_end(ENDED, problem)
        return bool(problem)

    def _note_end(self, how: str, reason: str) -> None:
        log.warning("the session ends: %s", reason)
        if not self._node:
            note_end(self._folder, how, reason)

    def _is_idle(self) -> bool:
        assert self._board is not None
        assert self._owners is not None
        regions = self._board.regions
        if self._has_ranks:
            regions = [regions[rank.rank] for rank in self._ranks.values()]
        elif any(region.seen_at_ns <= self._owners.left_at_ns for region in regions):
            return False  # what is here of other hosts is as old as the owner's last look at them
        return not any(region.request for region in regions)

    def _on_kernel_gone(self) -> None:
        assert self._owners is not None
        if self._link is not None:
            self._link.close()
        self._link = None
        self._end_trial()
        self._owners.leave()
        self._set_owner(0)

    def _accept(self) -> bool:
        """Take in one who has connected; whether the session is to end."""
        assert self._owners is not None
        # The owner before may have gone just now: its end comes first, also if it is read later.
        while self._link is not None and self._link.poll():
            if not self._receive():
                return True
        if self._link is not None and not self._is_elsewhere and not self._kernel.is_alive:
            self._on_kernel_gone()
        found = self._owners.accept(
            self._link, self._attached, self._read_board, partial(read_parts, self._folder)
        )
        if isinstance(found, attach.EndSession):
            self._note_end(WAS_ENDED, found.reason)
            return True
        if found is not None:
            self._link, pid = found
            if self._link is None:
                self._on_kernel_gone()
            elif not self._is_elsewhere:
                self._kernel.follow(pid)
        return False

    def _attached(self, epoch: int) -> attach.Attached:
        ends = self._ends.values()
        return attach.Attached(
            epoch=epoch,
            host=self._host_info(),
            store_port=self._store_port,
            ranks={rank.rank: (rank.generation, pid) for pid, rank in self._ranks.items()},
            events=(*ends, *([self._store_end] if self._store_end else [])),
            pid=os.getpid(),
        )

    def _host_info(self, *, identify: bool = False) -> HostInfo:
        if not self._has_ranks:
            return HostInfo(socket.gethostname(), os.getpid(), (), (), "", 0)
        from distsession.engine import host_info  # torch, most of a second

        return host_info.host_info(identify)

    def _read_board(self, whole: bool) -> attach.BoardReply:
        """What this node's ranks have written down, for somebody on the kernel's host."""
        assert self._board is not None
        if whole or self._mirror is None:
            self._mirror = Mirror(self._board, self._here)
            self._processes = ProcessWatch(self._board, self._here, os.getpid())
        self._processes.look()
        frames = board_mirror.pack(self._mirror.changes())
        return attach.BoardReply(frames, time.monotonic_ns())

    def _adopt(self, epoch: int) -> None:
        """The sockets of another owner are there."""
        if self._node:
            self._end_relay()
            self._start_relay(epoch)
        self._set_owner(epoch)

    def _set_owner(self, epoch: int) -> None:
        for rank in self._ranks.values():
            if rank.owners is not None:
                with contextlib.suppress(OSError):  # it is just ending
                    rank.owners.send(attach.SetOwner(epoch))

    def _end_relay(self) -> None:
        """Ranks get what has come for them by now, and no more of it."""
        if not self._relay_pid:
            return
        _signal(self._relay_pid, signal.SIGTERM)
        deadline = time.monotonic() + RELAY_END_TIMEOUT_S
        while not os.waitpid(self._relay_pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                _signal(self._relay_pid, signal.SIGKILL)
            time.sleep(0.002)
        self._relay_pid = 0

    # --- getting ready ----------------------------------------------------------------------------

    def _prepare(self, message: PrepareAgent) -> bool:
        _find_modules_as(message.sys_path)
        self._has_ranks = message.has_ranks
        if not self._node:  # a process without torch is forked in a tenth of the time
            with contextlib.suppress(OSError):  # the start of ranks tries again, and says why not
                self._start_store()
        if not self._has_ranks:
            self._tell(AgentReady(self._host_info(), self._node))
            return True
        with _without_collections():
            from distsession.engine import host_info

            problem = host_info.torch_problem()
            if problem:
                self._tell(AgentFailed(reason=problem))
                return False
            from distsession.engine import ipython, rank  # noqa: F401
            from distsession.engine.collectives import torch_private

            torch_private.hide_from_compiler()
            if "numpy" in sys.modules:  # torch has imported it, and each rank will seed it
                _import_quietly("numpy.random")
        problem = import_modules(message.preload)
        if not problem and (why := host_info.fork_problem()):
            problem = (
                f"ranks cannot be forked: {why}, because of something that Python runs at its "
                "start."
            )
        if problem:
            self._tell(AgentFailed(reason=problem))
            return False
        self._tell(AgentReady(self._host_info(identify=message.identify), self._node))
        ipython.prepare_shell(self._folder)
        self._prepare_for_ranks()
        return True

    def _prepare_for_ranks(self) -> None:
        """After imports: do here what each rank would do, and copy the pages for."""
        if self._has_ranks:
            from distsession.engine.collectives import torch_private

            torch_private.prepare_ranks()

    def _preload(self, message: PreloadRequest) -> None:
        """Import modules for ranks that are forked later, or try in a child how that would go."""
        self._end_trial()
        if not message.modules:
            return
        known = tuple(name for name in message.modules if name in sys.modules)
        if not message.is_trial:
            _find_modules_as(message.sys_path)
            self._end_spares()
            problem = import_modules(message.modules)
            self._prepare_for_ranks()
            self._renew_spares()
            self._tell(PreloadReply(message.number, self._node, problem, known))
            return
        mine, its = Pipe(duplex=False)
        agent = os.getpid()
        try:
            pid = self._fork_child()
        except OSError as error:
            mine.close()
            its.close()
            problem = f"it could not be tried whether that works: {process_limit.refused()}"
            log.warning("no process could be forked: %s", error)
            self._tell(PreloadReply(message.number, self._node, problem, known))
            return
        if pid == 0:
            with exit_after():
                os.setsid()  # what it starts ends with it
                die_with_parent(agent)
                _find_modules_as(message.sys_path)
                its.send(import_modules(message.modules))
        its.close()
        reply = PreloadReply(message.number, self._node, "", known)
        self._trial = _Trial(pid, message.modules, mine, reply)

    def _end_trial(self) -> None:
        """Nobody waits for it any more."""
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.link.close()
            _signal_group(trial.pid, signal.SIGKILL)
            _signal(trial.pid, signal.SIGKILL)  # it may not have come to its setsid yet

    def _report_trial(self, trial: _Trial, returncode: int) -> None:
        """The child has ended, as the import went or by a crash."""
        self._trial = None
        problem = f"importing {', '.join(trial.modules)} ends the process: "
        problem += signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
        with trial.link, contextlib.suppress(EOFError, OSError):
            problem = trial.link.recv()
        with contextlib.suppress(OSError):  # the kernel may be gone already
            self._tell(replace(trial.reply, problem=problem))

    def _start_store(self) -> None:
        """Fork the process that holds the rendezvous store, which thereby outlives every rank."""
        listener = store_server.bind(store_server.socket_path(self._folder))
        agent = os.getpid()
        self._store_pid = self._fork_child()
        if self._store_pid == 0:
            with exit_after():
                store_server.serve(listener, agent)
        listener.close()

    def _start_tcp_store(self, port: int) -> None:
        """Fork the process that holds a store for scripts that meet by an address and a port.

        Nothing of the session's own goes through it, unless the ranks use NCCL. Whoever can connect
        to a port of this machine can reach it, and at worst end it: so it is a process of its own.
        """
        listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._store_port = listener.getsockname()[1]
        agent = os.getpid()
        self._tcp_store_pid = self._fork_child()
        if self._tcp_store_pid == 0:
            with exit_after():
                from distsession.engine import store

                store.serve_tcp(listener, agent)
        listener.close()

    def _replace_store(self, pid: int, returncode: int) -> None:
        """A store has ended: start another at the same place, and tell the kernel."""
        is_tcp = pid == self._tcp_store_pid
        log.error("%s ended with %d", "torch's store" if is_tcp else "the store", returncode)
        if is_tcp:
            self._tcp_store_pid = 0
        else:
            self._store_pid = 0
        if self._is_ending:
            return
        now = time.monotonic()
        self._store_ends = [at for at in self._store_ends if now - at < STORE_ENDS_WITHIN_S]
        self._store_ends.append(now)
        is_replaced = len(self._store_ends) < MAX_STORE_ENDS
        try:
            if is_replaced and is_tcp:
                self._start_tcp_store(self._store_port)
            elif is_replaced:
                self._start_store()
        except OSError:
            log.exception("another one could not be started")
            is_replaced = False
        ended = StoreEnded(pid, returncode, is_tcp, is_replaced)
        if self._link is None:
            self._store_end = ended
        with contextlib.suppress(OSError):
            self._tell(ended)

    # --- usage ------------------------------------------------------------------------------------

    def _request_usage(self, message: UsageRequest) -> None:
        from distsession.engine import usage

        pids = {rank.rank: pid for pid, rank in self._ranks.items()}
        if message.gpus and not self._usage_pid:
            self._start_usage()
        if not (message.gpus and self._ask_usage(message, pids)):
            self._tell(usage.read(message, pids))

    def _request_gpus(self, message: GpuRequest) -> None:
        if not self._usage_pid:
            self._start_usage()
        if not self._ask_usage(message, {}):
            self._tell(GpuReply(message.node, ()))

    def _read_log(self, message: LogRequest) -> None:
        """Send a part of a rank's log to a kernel that cannot open the file."""
        path = log_path(self._folder, message.rank, message.generation, message.stream)
        piece = read_piece(path, max(0, message.begin), max(0, message.count))
        self._tell(LogPiece(message.number, message.node, *piece))

    def _ask_usage(self, message: UsageRequest | GpuRequest, pids: dict[int, int]) -> bool:
        """Hand a question on; whether there is somebody to answer it."""
        if self._usage_link is None:
            return False
        try:
            self._usage_link.send((message, pids))
        except OSError:
            log.warning("the process that asks about GPUs has ended")
            self._usage_link = None
            return False
        return True

    def _start_usage(self) -> None:
        """Fork the process that asks NVML, of which ranks that are forked later have nothing."""
        mine, its = Pipe()
        agent = os.getpid()
        try:
            self._usage_pid = self._fork_child()
        except OSError:
            log.exception("nobody can be asked about GPUs")
            mine.close()
            its.close()
            return
        if self._usage_pid == 0:
            mine.close()
            with exit_after():
                from distsession.engine import usage

                usage.serve(its, agent)
        its.close()
        self._usage_link = mine

    def _forward_usage(self) -> None:
        assert self._usage_link is not None
        try:
            message = self._usage_link.recv()
        except (EOFError, OSError):  # the latter if it had not read all that it was sent
            log.warning("the process that asks about GPUs has ended")
            self._usage_link = None
        else:
            self._tell(message)

    def _take_board(self, message: StartRanks) -> None:
        """The board of this node's ranks: the kernel's own, or one of the node's."""
        self._board_descriptor = message.board
        self._is_elsewhere = message.board < 0
        self._has_own_board = bool(self._node) and not message.is_board_shared
        if message.board >= 0:
            os.set_inheritable(message.board, False)  # by forks it is, by other programs not
        if self._has_own_board:
            if message.board >= 0:
                os.close(message.board)
            self._board_descriptor = make_file()
            os.ftruncate(self._board_descriptor, file_size(message.world_size))
        self._here = message.here
        self._world_size = message.world_size

    def _start_relay(self, epoch: int) -> None:
        """Fork the process that everything to and from another node passes through."""
        folder = self._folder
        make_node_folder(folder, self._node)
        path = memory_path(folder, self._node, epoch)
        with contextlib.suppress(FileNotFoundError):  # of a relay that has ended
            os.unlink(path)
        links = LinkListener(path)
        mine, ready = Pipe(duplex=False)
        agent = os.getpid()
        self._relay_pid = self._fork_child()
        if self._relay_pid == 0:
            with exit_after():
                from distsession.engine import relay

                board = None
                if self._has_own_board:
                    board = Board(self._board_descriptor, self._world_size)
                relay.serve(links, ready, folder, self._node, agent, epoch, board, self._here)
        links.close()
        ready.close()
        mine.poll(RELAY_TIMEOUT_S)  # so that no rank tries to connect too early, and waits
        mine.close()

    # --- ranks ------------------------------------------------------------------------------------

    def _use_large_pages(self) -> None:
        """For ranks that are forked later."""
        if len(self._ranks) >= LARGE_PAGES_RANKS:
            log.debug("%d large pages", use_large_pages())

    def _fork_all(self, message: StartRanks) -> None:
        self._renew_spares()
        if len(self._spares) < len(message.ranks):
            self._prepare_fork()
        from distsession.engine.spares import Start

        start = Start(message, self._store_port)
        for rank in message.ranks:
            self._fork(start, rank)
        self._forked_at, self._started = time.monotonic(), message

    def _prepare_fork(self) -> None:
        self._finalizers.keep_back()
        self._oom_kills.look_up(os.getpid())

    def _fork(self, start: Start, rank_number: int) -> None:
        spare = self._spares.pop() if self._spares else self._fork_spare()
        while not spare.become(start, rank_number):
            spare = self._fork_spare()  # that one has been killed
        self._ends.pop(rank_number, None)
        ranks = start.ranks
        self._ranks[spare.pid] = _Rank(
            rank_number, ranks.generation, ranks.folder, spare.memory, spare.owners
        )

    def _fork_spare(self) -> Spare:
        from distsession.engine import spares

        kept = self._owners is not None
        spare = spares.fork_spare(self._fork_child, self._pages, is_kept=kept)
        self._oom_kills.watch(spare.pid)
        return spare

    def _renew_spares(self) -> None:
        """Have spares made of this process as it is now, when there is nothing else to do."""
        self._end_rehearsal()
        steps = [step for step in self._later if step not in (self._rehearse, self._make_spares)]
        self._later = [*steps, self._rehearse]

    def _rehearse(self) -> None:
        """See what a rank that is forked now copies and maps as it begins; then make spares."""
        if time.monotonic() - self._forked_at < SPARES_AFTER_S or self._started is None:
            self._later.append(self._rehearse)  # the last there is
            return
        self._prepare_fork()
        from distsession.engine.rehearsal import begin_rehearsal

        try:
            self._rehearsal = begin_rehearsal(self._fork_child, self._started)
        except OSError:  # too many processes, or no room
            self._later.append(self._make_spares)

    def _on_rehearsal(self, rehearsal: Rehearsal) -> None:
        pages = rehearsal.result(MAX_COPIED_PAGES)
        if pages is None:
            log.debug("a rank could not be rehearsed")
        else:
            self._pages = pages
        self._end_rehearsal()
        self._later.append(self._make_spares)

    def _end_rehearsal(self) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            rehearsal.end()

    def _make_spares(self) -> None:
        """For the next restart, or for a rank that dies."""
        self._prepare_fork()
        with contextlib.suppress(OSError):  # too many processes, or too little memory
            while len(self._spares) < min(len(self._here), MAX_SPARES):
                self._spares.append(self._fork_spare())

    def _end_spares(self) -> None:
        """They have not what this process has now, or are not needed any more."""
        for spare in self._spares:
            _signal(spare.pid, signal.SIGKILL)
        while self._spares:
            self._await_child()

    def _fork_child(self) -> int:
        """The pid of a child; 0 in the child, which has nothing of this process any more."""
        # A child that is told to end must not run the agent's handlers, which would end all that
        # the agent has started.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        # A collection in a child then does not copy the pages of what all share; nor does a rank
        # look through these objects for modules that hold a group.
        gc.freeze()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_child()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _become_child(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        for rank in self._ranks.values():
            if rank.owners is not None:
                rank.owners.close()
        trial = None if self._trial is None else self._trial.link
        rehearsal = None if self._rehearsal is None else self._rehearsal.link
        for spare in self._spares:
            spare.close()
        for link in (self._link, self._usage_link, self._owners, trial, rehearsal):
            if link is not None:
                link.close()
        os.close(self._wake)
        os.close(self._wake_writer)

    def _stop(self, pids: set[int]) -> None:
        """End some ranks: first by SIGTERM, then by SIGKILL to all that they started."""
        began, graces = time.monotonic(), {}
        for pid in pids & self._ranks.keys():
            self._ranks[pid].stopping = True
            _signal(pid, signal.SIGTERM)
        for pid in pids & self._ranks.keys():
            graces[pid] = _Grace(pid)
        looked_at = began
        while leaving := self._ranks.keys() & graces.keys():
            now = time.monotonic()
            if now - looked_at > EXIT_LOOK_S:
                looked_at = now
                for pid in leaving:
                    if graces[pid].used_s(now) > EXIT_GRACE_S or now - began > EXIT_LIMIT_S:
                        del graces[pid]
                        _signal_group(pid, signal.SIGKILL)
                        _signal(pid, signal.SIGKILL)
            self._await_child()
        while pids & self._ranks.keys():
            self._await_child()

    def _await_child(self) -> None:
        """Wait a moment for the end of a child."""
        wait([self._wake], timeout=EXIT_LOOK_S)
        self._empty_wake()
        self._reap()

    def _empty_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def _reap(self) -> None:
        """Take note of every child that ended, and end what it left behind."""
        while True:
            try:
                # WNOWAIT keeps the zombie, and with it the number of its process group, until the
                # group has been killed: nobody else can get that number in between.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            spare = next((spare for spare in self._spares if spare.pid == pid), None)
            oom = False, 0
            if pid in self._ranks or (self._trial is not None and pid == self._trial.pid):
                _signal_group(pid, signal.SIGKILL)
            if pid in self._ranks or spare is not None:
                oom = self._oom_kills.check(pid)
            if spare is not None:
                self._spares.remove(spare)
                spare.close()
            # Before it is reaped: a signal may end this process in between, and then waits for all
            # ranks that it still has.
            rank = self._ranks.pop(pid, None)
            _, status = os.waitpid(pid, 0)
            self._report(pid, rank, os.waitstatus_to_exitcode(status), oom)

    def _report(self, pid: int, rank: _Rank | None, returncode: int, oom: tuple[bool, int]) -> None:
        if pid in (self._store_pid, self._tcp_store_pid):
            self._replace_store(pid, returncode)
            return
        if pid == self._usage_pid:
            self._usage_pid = -1  # it would end again
            return
        if pid == self._relay_pid:
            self._relay_pid = 0
            if returncode:  # else it has ended since the kernel is gone
                log.error("the relay of node %d ended with %d", self._node, returncode)
            return
        if self._trial is not None and pid == self._trial.pid:
            self._report_trial(self._trial, returncode)
            return
        if self._rehearsal is not None and pid == self._rehearsal.pid:
            self._rehearsal.close()
            self._rehearsal = None
            self._later.append(self._make_spares)
            return
        if rank is None:
            return
        from distsession.engine import deaths

        fault = _read_end(rank, "fault")
        if not fault and -returncode in CRASHES:  # the user's code has faulthandler write to stderr
            fault = _read_end(rank, "err")
        if returncode == -signal.SIGSEGV:  # as faulthandler itself may have ended, too
            returncode = -deaths.fault_signal(fault) or returncode
        remains = deaths.read_fault(fault) or deaths.read_memory(rank.memory)
        if not rank.stopping:
            _give_back_reserved(rank)
        elif not self._is_ending:  # somebody waits for this end, to have fresh ranks
            self._stopped.append(rank)
            if self._give_back not in self._later:
                self._later.append(self._give_back)
        rank.memory.close()
        if rank.owners is not None:
            rank.owners.close()
        tail = _read_end(rank, "out") + _read_end(rank, "err")
        message = RankExited(
            rank=rank.rank,
            generation=rank.generation,
            pid=pid,
            returncode=returncode,
            expected=rank.stopping,
            with_agent=self._is_ending and rank.stopping,
            log_tail=tail,
            limit="" if rank.stopping else process_limit.refusal(tail),
            oom=returncode == -signal.SIGKILL and not rank.stopping and oom[0],
            oom_limit=oom[1],
            place=remains.place,
            runs=remains.runs,
            is_certain=remains.is_certain,
            is_idle=remains.is_idle,
            is_terminated=remains.is_terminated,
            stack=remains.stack,
        )
        if self._owners is not None:
            self._ends[rank.rank] = message
        with contextlib.suppress(OSError):  # the kernel may be gone already
            self._tell(message)

    def _give_back(self) -> None:
        while self._stopped:
            _give_back_reserved(self._stopped.pop())

    def _end(self) -> None:
        self._kernel.is_leaving = True
        self._is_ending = True
        if self._owners is not None:
            self._owners.close()  # who wants to attach now is told so at once
        self._finalizers.give_back()
        self._end_trial()
        self._end_rehearsal()
        self._end_spares()
        self._stop(set(self._ranks))
        for pid in (self._store_pid, self._tcp_store_pid, self._usage_pid, self._relay_pid):
            if pid > 0:
                _signal(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


class Kernel:
    """The process that started this one, as far as signals tell of it.

    Args:
        pid: Its own. What ``getppid()`` gives may be somebody else already.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self._started = 0
        """When it was, in the system's own unit, if it is not the one that started this process."""
        self.is_leaving = False
        """This process ends, so no signal needs to raise anything any more."""
        self.is_optional = False
        """This process goes on without it, for a while."""
        self.has_terminated = False
        """It has told this process to end, and so it lives and cleans up."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGHUP, self._on_hangup)
        signal_when_parent_ends(signal.SIGHUP)

    def follow(self, pid: int) -> None:
        """Another process takes the place of the one that started this one."""
        self.pid, self._started = pid, started_at(pid)

    @property
    def is_alive(self) -> bool:
        if self._started:
            return started_at(self.pid) == self._started
        return os.getppid() == self.pid

    def _on_terminate(self, *_: Any) -> None:
        self.has_terminated = True
        self._leave()

    def _on_hangup(self, *_: Any) -> None:
        if not self.is_alive and not self.is_optional:
            self._leave()

    def _leave(self) -> None:
        if not self.is_leaving:
            self.is_leaving = True
            raise SystemExit(0)  # also out of the midst of an import


def _read_end(rank: _Rank, stream: str) -> str:
    """The last lines of a file that a rank wrote; empty where there is none."""
    return read_tail(log_path(rank.folder, rank.rank, rank.generation, stream), LOG_TAIL_BYTES)


def _give_back_reserved(rank: _Rank) -> None:
    """What the files of a rank that has ended have reserved behind their ends."""
    for stream in ("out", "err"):
        path = log_path(rank.folder, rank.rank, rank.generation, stream)
        with contextlib.suppress(OSError):
            os.truncate(path, os.path.getsize(path))


class _Grace:
    """The time that a rank has had to leave.

    What it waits for a processor is not of it, nor is a rest of this process or of the machine,
    which shows as a look that comes late.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._looked_at = time.monotonic()
        self._ran_s, self._waited_s = scheduled(pid)
        self._used_s = 0.0

    def used_s(self, now: float) -> float:
        """Seconds of it; to be asked about every `EXIT_LOOK_S`."""
        (ran_s, waited_s), runs = scheduled(self._pid), process_state(self._pid) == RUNS
        passed_s = min(now - self._looked_at, 2 * EXIT_LOOK_S)
        if runs and ran_s:  # or only could: a wait that lasts is not counted as one yet
            self._used_s += min(passed_s, ran_s - self._ran_s)
        else:
            self._used_s += max(0.0, passed_s - (waited_s - self._waited_s))
        self._looked_at, self._ran_s, self._waited_s = now, ran_s, waited_s
        return self._used_s


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(pid: int, number: int) -> None:
    # A child that has not come to its setsid yet is still in our own group.
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)


def _find_modules_as(sys_path: Sequence[str]) -> None:
    """Find modules as the kernel does: its path comes first."""
    sys.path[:] = [*sys_path, *(p for p in sys.path if p not in sys_path)]
    importlib.invalidate_caches()  # what was installed since


def _import_quietly(name: str) -> None:
    """Import a module for the ranks, which are to find the environment as if none had been.

    ``torch._dynamo`` puts where its cache is into ``TORCHINDUCTOR_CACHE_DIR`` (torch 2.13), and
    ranks would keep to that even where a cell sets another ``TMPDIR`` first.
    """
    before = dict(os.environ)
    try:
        importlib.import_module(name)
    except Exception:
        log.exception("could not preload %s", name)
    for added in os.environ.keys() - before.keys():
        del os.environ[added]
    os.environ.update(before)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Import torch: a sixth of that is looking through its objects for some that nobody needs.

    Nor are they looked through later, for they stay as long as the agent.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def main() -> NoReturn:
    """Serve the kernel whose folder, pid and epoch are named by the command line."""
    folder, node, kernel = sys.argv[1], int(sys.argv[2]), Kernel(int(sys.argv[3]))
    epoch = int(sys.argv[4])
    try:
        lock = folder_lock.hold(folder)
    except FileNotFoundError:  # the session has been closed, or its kernel is gone
        sys.exit(0)
    # On our own logger: a handler on the root would make the user's basicConfig() do nothing.
    logging.getLogger("distsession").addHandler(logging.StreamHandler())
    try:
        if kernel.is_alive:
            link = Connection(unix_socket.connect(socket_path(folder, "agent", epoch)).detach())
            link.send(AgentStarted(node))
            Agent(link, node, kernel, folder).serve()
    except OSError as error:
        log.warning("the kernel cannot be reached: %s", error)
    finally:
        kernel.is_leaving = True
        began = time.monotonic()

        def is_anothers() -> bool:
            """Whether to leave the folder to the kernel or, at last, to the next start's sweep."""
            waited = time.monotonic() - began
            if kernel.is_alive and (kernel.has_terminated or waited > KERNEL_END_TIMEOUT_S):
                return True
            return waited > ORPHANS_TIMEOUT_S

        folder_lock.remove_unused(folder, lock, is_anothers)
    sys.exit(0)
