"""The session: ranks that stay, from their start to their end."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distsession.cluster.attachment import Attachment
from distsession.cluster.base import Channel, Launcher
from distsession.cluster.interrupts import interrupts_held
from distsession.cluster.kept import ended_sessions, find_kept, kept_sessions
from distsession.cluster.kept_session import refuse_lost
from distsession.display import panel as static_panel
from distsession.display import render
from distsession.display.html import element
from distsession.display.table import Table
from distsession.errors import OptionsError, RunError, RunInterrupt, SessionStateError
from distsession.export import script as export_script
from distsession.export.history import History
from distsession.kernel import transfer
from distsession.kernel.adopted_runs import AdoptedRuns
from distsession.kernel.kept_state import look_at
from distsession.kernel.kept_table import kept_html, kept_text
from distsession.kernel.log_text import FarLog, LocalLog, LogSource
from distsession.kernel.nccl_ras import ras_report
from distsession.kernel.output import Output, Silent
from distsession.kernel.progress import ProgressNotice
from distsession.kernel.recovery import DIAGNOSE_TIMEOUT_S, Recovery
from distsession.kernel.replay import show_again
from distsession.kernel.requests import Requests
from distsession.kernel.runs import LastRun
from distsession.kernel.session_record import SessionRecord
from distsession.kernel.snapshot import Snapshots
from distsession.kernel.timeline import bring
from distsession.options import SessionOptions, option_sources, resolve_options
from distsession.protocol.diagnosis import diagnose
from distsession.protocol.messages import DebugRequest
from distsession.protocol.rank_state import AbortReason
from distsession.ranks import (
    Host,
    RankInfo,
    RankSelector,
    count_text,
    host_names,
    hosts_of,
    ranks_text,
    select_hosts,
    select_ranks,
)
from distsession.results import RankResults
from distsession.timeline.timeline import Timeline
from distsession.view import RankView
from distsession.viewer import SessionViewer

__all__ = ["Session", "Table", "current_session"]

CLOSED = "this session is closed: start another with Session(...)."

CLIENT_TIMEOUT = 60.0
"""Seconds that ``session.client`` waits for ipyparallel."""

FORCE_TIMEOUT_S = 5.0
"""Seconds that what is forced to end may take until its ranks are replaced."""

END_S = 0.5
"""Seconds after a Ctrl-C within which a process is told to end that it has only announced."""

_open: list[Session] = []
_numbers = itertools.count(1)

output_factory: Callable[[Callable[[int], str] | None], Output] | None = None
"""Makes the place for output where a session was given none; the package's face sets it. It gets
what tells the path of a rank's log file, or None for output that belongs to no run."""

panel_factory: Callable[[Session | SessionViewer], Table | None] | None = None
"""Makes what a notebook shows of a session, or nothing elsewhere; the package's face sets it."""


class Session(RankView):
    """Persistent ranks joined in a process group.

    It is the view of all its ranks. It starts at once and returns when every rank is in the group::

        with Session(4) as session:
            session.run(train, lr=1e-3)

    Args:
        ranks: Number of ranks. Default: one per visible GPU, or 2 where there is none.
        output: Makes the place for a run's output. Default: the notebook's cell, or stdout.
        **options: See :class:`~distsession.options.SessionOptions`; also from ``DISTSESSION_*``
            variables.

    Raises:
        OptionsError: An option that cannot work here.
        LaunchError: The ranks did not start. Nothing of them is left.
    """

    def __init__(
        self,
        ranks: int | None = None,
        *,
        output: Callable[[], Output] | None = None,
        **options: Any,
    ):
        if ranks is not None:
            options["ranks"] = ranks
        wanted = resolve_options(options)
        self._prepare(wanted, option_sources(options), output)
        self._begin(lambda: _make_launcher(wanted, self._on_background), "starting the ranks")

    def _prepare(
        self,
        options: SessionOptions,
        sources: dict[str, str],
        output: Callable[[], Output] | None,
    ) -> None:
        """Everything that needs no rank."""
        self.options: SessionOptions = options
        self.option_sources = sources
        self._number = next(_numbers)
        self._output = output
        self._ended = ""
        """How the session has ended, or this process has let go of it."""
        self._owner = os.getpid()
        self._lifecycle = threading.RLock()
        transfer.prepare()
        self.history = History()
        self.recovery = Recovery(
            options.hang_grace, lambda: self._waiting("connecting the process group anew")
        )

    def _begin(self, make: Callable[[], Launcher], doing: str) -> None:
        """Start the ranks, or attach to them."""
        launcher: Launcher | None = None
        try:
            self.recovery.launcher = launcher = make()
            with self._waiting(doing):
                infos = launcher.start()
        except BaseException as error:
            job = "" if launcher is None else launcher.job
            if launcher is not None:
                launcher.close()
            if not isinstance(error, KeyboardInterrupt):
                raise
            # Whatever it met: none of that says more.
            what = "start" if doing.startswith("starting") else "attach"
            given_back = f"; job {job} was given back" if job and what == "start" else ""
            raise RunInterrupt(f"the {what} was stopped{given_back}.") from None
        requests = Requests(self.recovery, self.output, self.check_open)
        requests.leave = self._leave
        requests.import_hints.forget(self.options.preload)
        super().__init__(self, requests, self.history, range(len(infos)))
        self._record = SessionRecord(requests, self.history)
        self._adopted = AdoptedRuns(requests, self.history)
        if self.options.keep and self.launcher.epoch == 1:
            self._record.begin(self.launcher.folder, 1)
        _open.append(self)
        for sentence in (*infos[0].torch_changes, *self.launcher.notes):
            warnings.warn(sentence, RuntimeWarning, stacklevel=3)

    # --- sessions that are kept -------------------------------------------------------------------

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        take: bool = False,
        output: Callable[[], Output] | None = None,
    ) -> Session:
        """Become the owner of a session that is kept, whose ranks are there.

        Ranks, variables and group are as they were. What ran in earlier kernels is known here:
        :meth:`show_output`, :meth:`timeline`, :meth:`export`. A cell that runs still is waited for
        by :meth:`follow`; the values of calls whose caller is gone are those of :meth:`pending`.

        Args:
            name: Of the session, of its folder, or the pid of its agent. Default: the only one
                that there is.
            take: Also if another kernel owns it, which is told so and can ask nothing of it then.
            output: Makes the place for a run's output. Default: the notebook's cell, or stdout.

        Raises:
            KeptSessionError: There is none, or more than one, or it is of another version.
            SessionStateError: Somebody owns it, or it ends just now.
        """
        from distsession.cluster.attachment import connect

        kept = find_kept(name)
        if (mine := _attached_to(kept.folder)) is not None:
            return mine
        refuse_lost(kept)
        attachment = connect(kept.folder, kept.version, take=take)
        options = attachment.state.options
        session = cls.__new__(cls)
        session._prepare(options, dict.fromkeys(vars(options), "the session"), output)
        session._begin(
            lambda: _make_launcher(options, session._on_background, attachment),
            f"attaching to {kept}",
        )
        try:
            with interrupts_held():
                session._take_over()
        except BaseException:  # it goes on without this process, as it was
            session._detach_now()
            raise
        return session

    @classmethod
    def view(
        cls, name: str | None = None, *, output: Callable[[], Output] | None = None
    ) -> SessionViewer:
        """Look on at a session that is kept, whoever owns it: nothing can be asked of its ranks.

        Args:
            name: As of :meth:`attach`.
            output: Makes the place for what its ``show_output`` shows.

        Raises:
            KeptSessionError: There is none, or more than one, or it is of another version.
        """

        def make_output(viewer: SessionViewer) -> Output:
            log = lambda rank: str(viewer.log_path(rank) or "")  # noqa: E731
            return _make_output(output, log, viewer.options)

        def make_panel(viewer: SessionViewer) -> Table | None:
            return None if panel_factory is None else panel_factory(viewer)

        return SessionViewer(find_kept(name), make_output, make_panel)

    @classmethod
    def list(cls) -> Table:
        """The sessions of this user that are kept: who owns each, what it does and uses."""
        states = [look_at(kept) for kept in kept_sessions()]
        ended = ended_sessions()
        return Table(kept_text(states, ended), kept_html(states, ended))

    def _take_over(self) -> None:
        launcher = self.launcher
        known = self._record.restore(launcher.folder, launcher.epoch)
        self._adopted.take(launcher.adopted, known)
        self._record.begin(launcher.folder, launcher.epoch)
        self._adopted.begin()

    def follow(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Wait for cells and calls that an earlier kernel has begun, as that kernel would have.

        Their output goes on here, a Ctrl-C stops them, and their errors are raised; of several the
        last, and the others are said. What has ended meanwhile is shown once.

        Args:
            say: Gets a line for each: which it is, and when it was begun and ended.

        Raises:
            RunError: It raised on a rank.
            RunInterrupt: Ctrl-C or Jupyter's Stop; what waits behind it goes on in the background.
        """
        self.check_open()
        for line in self._adopted.take_lost():
            say(line)
        waiting = self._adopted.waiting
        for run in waiting:
            say(self._adopted.heading(run))
            try:
                self._adopted.follow(run)
            except RunError as error:
                if run is waiting[-1]:
                    raise
                say("\n".join(error._render_traceback_()))
            except BaseException:
                self._adopted.follow_behind()
                raise

    def pending(self) -> Sequence[Future[RankResults[Any]]]:
        """Futures of the values that callers in an earlier kernel waited for, in their order.

        They are those of calls, and of cells whose values were to be kept, that had not ended when
        this process attached, or whose end no kernel had seen.
        """
        self.check_open()
        return [*self._adopted.futures]

    def detach(self) -> None:
        """Let go of a session that is kept: the ranks go on, and its lease runs.

        Raises:
            SessionStateError: It is not kept.
        """
        self.check_open()
        if not self.options.keep:
            raise SessionStateError(
                f"{self.name} is not kept, so its ranks cannot go on without this process: "
                'Session(4, keep="12h") or %session start 4 --keep 12h starts one that can.'
            )
        with self._lifecycle, interrupts_held():
            self._detach_now()

    def _detach_now(self) -> None:
        self._forget(
            f"this process has let go of {self.name}: Session.attach({self.name!r}) or "
            f"%session attach {self.name} takes it up again."
        )
        self.launcher.detach()

    def _leave(self, output: Output) -> str:
        """At a Ctrl-C: let go of ranks that are kept if it only announces the end of the process.

        Jupyter interrupts a kernel before it restarts it or shuts it down.
        """
        if not (self.options.keep and output.ends_soon(END_S)):
            return ""
        with self._lifecycle, interrupts_held():
            if not self._ended:
                self._detach_now()
        return f"this process ends. What it waited for goes on in {self.name}, which is kept."

    # --- running ----------------------------------------------------------------------------------

    def __getitem__(self, selector: RankSelector) -> RankView:
        ranks = select_ranks(selector, self.world_size)
        return RankView(self, self.requests, self.history, ranks)

    def on(self, *hosts: str | int) -> RankView:
        """The ranks of one host, or of some: ``session.on("gpu2").run(f)``.

        Args:
            *hosts: Names of :attr:`hosts`, or numbers of nodes.

        Raises:
            OptionsError: There is no such host; the message names those that there are.
        """
        ranks = select_hosts(hosts, self.hosts)
        return RankView(self, self.requests, self.history, ranks)

    def debug(self, rank: int | None = None) -> None:
        """Open the debugger where the last cell or call failed on a rank.

        The rank keeps the error, and with it the variables of the frames that it went through,
        until the next cell or call begins there.

        Args:
            rank: Which. Default: the one whose error was shown first.

        Raises:
            SessionStateError: Nothing has failed there.
        """
        self.check_open()
        if self.channel.runs_in_caller:
            raise SessionStateError(
                "an inline session keeps no errors: write breakpoint() before the line that fails."
            )
        chosen = self.requests.failed_rank if rank is None else rank
        if chosen is None:
            raise SessionStateError("nothing has failed, so there is nothing to debug.")
        (chosen,) = select_ranks(chosen, self.world_size)
        problem = self.requests.call([chosen], DebugRequest, [])[chosen]
        if problem:
            raise SessionStateError(f"rank {chosen} {problem}.")

    def interrupt(self, *, force: bool = False) -> bool:
        """Raise KeyboardInterrupt in whatever runs on the ranks, from any thread.

        Args:
            force: End it, also if its code catches that: what is raised then is raised again as
                soon as it has been caught. Ranks that do not come back from C code are replaced
                by fresh processes, without their variables, which is said.

        Returns:
            Whether anything ran.
        """
        self.check_open()
        running = self.recovery.stop_all(force=force)
        is_hit = self.recovery.cancel_waits() or bool(running)
        if force and (stuck := self.recovery.await_return(running, FORCE_TIMEOUT_S)):
            self.restart(stuck)
            have = "has" if len(stuck) == 1 else "have"
            output = self.output(is_run=False)
            output.remark(
                f"{ranks_text(stuck)} could not be ended in C code, and {have} been replaced by "
                f"{'a fresh process' if len(stuck) == 1 else 'fresh processes'}, without variables."
            )
            output.close()
        return is_hit

    # --- from notebook to job ---------------------------------------------------------------------

    def export(
        self,
        path: str | os.PathLike[str],
        cells: Iterable[int | str] | None = None,
        *,
        slurm: bool = False,
        check: str | Sequence[str] = (),
        tolerance: float = 0.0,
        hash_seeds: bool = False,
    ) -> Path:
        """Write what ran on the ranks as a script for ``torchrun`` or ``distsession run``.

        Cells and calls of :meth:`run` that succeeded are written in the order in which they ran.
        Magics and ``!`` are translated; what cannot be written is an error that names it.

        Args:
            path: The script, such as ``"train.py"``. A file that no export wrote is left alone.
            cells: Which: numbers of cells, and names of functions for their calls. Default: all.
            slurm: Write a Slurm batch file beside it, too.
            check: Names of variables for :meth:`check_export`, which is called with these.
            tolerance: For the same.
            hash_seeds: For the same.

        Returns:
            The script's path.

        Raises:
            ExportError: Something cannot be written, or the check fails.

        Warns:
            ExportWarning: The script uses a name that nothing in it defines, such as a variable of
                a cell that failed.
        """
        self.check_open()
        script = export_script.write_script(self, path, cells, slurm=slurm)
        if check:
            export_script.check_script(self, Session, script, check, tolerance, hash_seeds)
        return script

    def check_export(
        self,
        path: str | os.PathLike[str],
        names: str | Sequence[str],
        *,
        tolerance: float = 0.0,
        hash_seeds: bool = False,
    ) -> dict[str, float]:
        """Run a script on as many ranks as there are here, and compare variables with those here.

        Args:
            path: The script.
            names: Variables: numbers, strings, tensors, containers of these, and what has a
                ``state_dict()``.
            tolerance: By how much numbers may differ, relative to the session's where these are
                above 1. Default: not at all.
            hash_seeds: Give each rank another seed for the hashes of strings, as under torchrun,
                so that sets of strings are ordered differently. That takes longer to start.

        Returns:
            The largest difference of each.

        Raises:
            ExportError: The script fails, or a value differs.
        """
        self.check_open()
        return export_script.check_script(self, Session, path, names, tolerance, hash_seeds)

    # --- facts ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What it is called: a session that is kept by its name, or else by that of its folder."""
        if self.options.name or not self.options.keep:
            return self.options.name or f"session {self._number}"
        return os.path.basename(self.launcher.folder)

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        """The facts of each rank."""
        return self.launcher.infos

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that the ranks are on, in the order of their ranks."""
        return hosts_of(self.infos, self.launcher.host_address)

    @property
    def job(self) -> str:
        """The id of the scheduler's job that the ranks are in; empty where there is none."""
        return self.launcher.job

    @property
    def is_open(self) -> bool:
        return not self._ended

    @property
    def refusal(self) -> str:
        """Why nothing can be asked of the ranks from here; empty where it can."""
        return self.launcher.taken

    @property
    def launcher(self) -> Launcher:
        """What has started the ranks."""
        return self.recovery.launcher

    @property
    def channel(self) -> Channel:
        return self.launcher.channel

    @property
    def last_run(self) -> LastRun | None:
        """The cell or call that was run last."""
        return self.requests.last_run

    @property
    def client(self) -> Any:
        """The connected ``ipyparallel.Client``; waits until every rank is registered with it."""
        self.check_open()
        with self._waiting("connecting ipyparallel's client"):
            return self.launcher.client(CLIENT_TIMEOUT)

    def reconnect(self) -> None:
        """Connect the session's process group anew, on all ranks; their variables stay.

        What holds the group goes on: ``DistributedDataParallel``, meshes, subgroups. After
        ``destroy_process_group()`` there is a new group.

        Raises:
            SessionStateError: A rank runs something, is dead, or cannot join, or the session is
                inline.
        """
        self.check_open()
        if self.channel.runs_in_caller:
            raise SessionStateError(
                "the rank of an inline session has nobody to connect to: session.restart() makes "
                "its process group again, without its variables."
            )
        self.launcher.check_restart(())
        self.launcher.abort(AbortReason.FAILED, "it is being connected anew")
        if problem := self.recovery.reconnect(may_keep=False):
            raise SessionStateError(f"the process group is not connected: {problem}.")

    def show_config(self) -> Table:
        """What the session is made of, and what each rank does and uses.

        In a notebook the table is live and has buttons. Elsewhere it shows the present moment.
        """
        self.check_open()
        panel = None if panel_factory is None else panel_factory(self)
        if panel is not None:
            return panel
        overview = Snapshots(self).take()
        return Table(static_panel.snapshot_text(overview), static_panel.snapshot_html(overview))

    def devices(self) -> Table:
        """The device of each rank."""
        self.check_open()
        return Table(render.devices_text(self.infos), render.devices_html(self.infos))

    def diagnose(self, *, stacks: bool = False) -> Table:
        """What each rank does, and who waits for whom.

        The ranks are not disturbed: a thread of theirs beside the main one answers, and what it
        cannot say, since the interpreter is locked by C code, stands in memory that they share.
        Where NCCL's RAS service listens on this host, its report is shown as well.

        Args:
            stacks: Show the Python frames of each rank's main thread, too.
        """
        self.check_open()
        reports = self.recovery.reports(ask=True, timeout=DIAGNOSE_TIMEOUT_S)
        verdict = diagnose(reports)
        if stopped := self.recovery.stopped():
            verdict = replace(verdict, sentence=f"{verdict.sentence} {stopped}")
        names, ras = host_names(self.infos), ras_report(self.infos[0].backend)
        return render.diagnosis_table(reports, verdict, stacks, names, ras)

    def timeline(self, *, waits: bool = True) -> Timeline:
        """What the ranks did in the last cell, and who waited for whom.

        The last cell is the last call of :meth:`execute`, :meth:`run` or :meth:`submit`, on all
        ranks or on some. Expressions and transfers do not count. A notebook shows a picture;
        ``.save("trace.json")`` writes it for Perfetto.

        Args:
            waits: Wait for ranks that are busy; otherwise they are left out.

        Raises:
            SessionStateError: No cell has run, or its ranks have been replaced since.
        """
        self.check_open()
        return bring(self.requests, waits=waits)

    def log_path(self, rank: int, stream: str = "stdout") -> Path | None:
        """The file that has what a rank has written.

        It is there until the session is closed. It has everything, except that of more than the
        option ``keep_output`` the front is given back and reads as zeros, and that on a full disk
        text may be missing.

        Args:
            rank: Which.
            stream: ``"stdout"`` or ``"stderr"``.

        Returns:
            The path; None in an inline session, and of a rank on another host, where the file is.
        """
        return self.launcher.log_path(rank, stream)

    def log_source(self, rank: int, stream: str) -> LogSource:
        """The same file, also of another host, to be looked through."""
        launcher, name = self.launcher, self.launcher.log_place(rank, stream)
        if launcher.log_path(rank, stream) is not None or not name:
            return LocalLog(name)
        return FarLog(name, partial(launcher.read_log, rank, stream))

    def show_output(
        self,
        cell: int | None = None,
        ranks: RankSelector | None = None,
        kernel: int | None = None,
    ) -> Table:
        """Show again what the ranks put out in a cell: more of it than the notebook keeps.

        Text is read from the log files. Displays are there as long as those that came since take
        less than 64 MB of memory; what is missing is said. What was typed into an input box is
        not shown.

        Args:
            cell: The number of the notebook's cell. Default: the last that has put out something.
            ranks: Whose. Default: all that it ran on.
            kernel: Which of the kernels that had the session, from 1. Default: the last that ran a
                cell of that number.

        Returns:
            Of which cell it is and of when, what is missing, and the cell's error.

        Raises:
            SessionStateError: There is no output of that cell, or not of these ranks.
        """
        self.check_open()
        wanted = self.ranks if ranks is None else select_ranks(ranks, self.world_size)
        text = show_again(self.requests.outputs, wanted, self.output, cell, kernel)
        return Table(text, element("pre", text))

    def status(self) -> str:
        """One line on how the session is."""
        return f"{self.name}: {self._condition()}"

    def _condition(self) -> str:
        if self._ended:
            return "detached" if self._ended != CLOSED else "closed"
        if self.launcher.taken:
            return self.launcher.taken_over
        if not self.infos:
            return "its ranks are being started"
        facts = f"{count_text(self.world_size)}, {self.infos[0].backend}"
        if not self.launcher.is_alive:
            return f"its agent is gone ({facts}); session.restart() brings it back"
        dead = self.launcher.dead_ranks()
        if dead:
            ranks = sorted(dead)
            if len(ranks) == self.world_size > 1:
                return f"all ranks are dead ({facts}); session.restart() starts them again"
            be = "is" if len(ranks) == 1 else "are"
            hosts = host_names(info for info in self.infos if info.rank in dead)
            on = f"on {', '.join(dict.fromkeys(hosts.values()))}; " if hosts else ""
            return (
                f"{ranks_text(ranks)} {be} dead ({on}{facts}); "
                f"session.restart({ranks}) replaces {'it' if len(ranks) == 1 else 'them'}"
            )
        running = self.recovery.running()
        state = running or "idle"
        board = self.launcher.board
        regions = board.regions if board is not None else []
        alone = [region.rank for region in regions if region.is_without_group]
        if alone and not running:
            state = f"no process group on {ranks_text(alone)}"
        own = [region.rank for region in regions if region.has_own_group]
        if own and not (alone or running):
            state = f"{ranks_text(own)} in another process group"
        for region in regions:
            if region.is_asking:
                what = "is in the debugger" if region.is_in_debugger else "waits for input"
                state += f", rank {region.rank} {what} at {region.asks_at or 'an unknown place'}"
        problems = self.launcher.problems()
        return f"{state} ({facts}){f'. {problems}' if problems else ''}"

    def __repr__(self) -> str:
        return f"<Session {self._number}: {self._condition()}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.show_config().bundle() if self.is_open else {"text/plain": repr(self)}

    # --- life -------------------------------------------------------------------------------------

    def restart(
        self,
        ranks: RankSelector | None = None,
        *,
        hosts: str | Sequence[str] | Mapping[str, str] = (),
        restore: str | Sequence[str] = (),
    ) -> None:
        """Put fresh processes in the place of all ranks, or of some.

        Variables of the replaced ranks are lost; those of the others stay. All then join a new
        process group, so the others must be idle. Ranks that have died are always replaced.

        Args:
            ranks: Which. Default: all, unless hosts are named.
            hosts: All ranks of these, too: ``["gpu2"]``, where a host that is gone has come back;
                ``{"gpu2": "gpu3"}`` puts another host in the place of one.
            restore: Names of variables that the replaced ranks get from the lowest of the others.
                They are copied together, so an optimizer keeps hold of its model's parameters.

        Raises:
            LaunchError: They did not start.
            OptionsError: There is no such host, or the launcher chooses its hosts itself.
            SessionStateError: Another rank still runs something; or none is left to restore from.
            RunError: A name to restore is not there, or cannot be pickled.

        Nothing has changed after these errors, but where the fresh ranks cannot take what they are
        to get: that RunError says so.
        """
        names = (restore,) if isinstance(restore, str) else tuple(restore)
        with self._lifecycle:
            self.check_open()
            chosen = None if ranks is None else select_ranks(ranks, self.world_size)
            moves = dict[int, str]()
            if hosts:
                named = (hosts,) if isinstance(hosts, str) else tuple(hosts)
                chosen = tuple(sorted({*select_hosts(named, self.hosts), *(chosen or ())}))
                moves = self._moves(hosts if isinstance(hosts, Mapping) else {})
            sources = self._sources(chosen) if names else None
            self.launcher.check_moves(moves)
            if sources is None:
                self._replace(chosen, moves)
                return
            healthy, fresh = sources
            self.launcher.check_restart(chosen)
            nodes = {self.infos[rank].node_rank for rank in (healthy, *fresh)}
            lend = self.options.device_ipc == "auto" and len(nodes) == 1
            try:
                taken = transfer.take(self.requests, healthy, names, lend=lend)
            except RunError as error:
                error.add_note("No rank was replaced.")
                raise
            try:
                self._replace(chosen, moves)
            except BaseException:
                transfer.end_loan(self.requests, taken)
                raise
            try:
                transfer.give(self.requests, taken, fresh)
            except RunError as error:
                have, es = ("has a", "") if len(fresh) == 1 else ("have", "es")
                error.add_note(
                    f"{ranks_text(fresh)} {have} fresh process{es}, without {', '.join(names)}."
                )
                raise

    def _replace(self, chosen: Sequence[int] | None, moves: Mapping[int, str]) -> None:
        """Restart ranks, or where only that helps everything, once that is checked."""
        which = self.ranks if chosen is None else chosen
        if not self._must_start_anew(which):
            self.launcher.check_restart(chosen)
        self.launcher.move_hosts(moves)
        if not self._must_start_anew(which):
            self.launcher.cancel_reconnect()
            with self.recovery.lock, self._waiting(f"restarting {ranks_text(which)}"):
                self.launcher.restart(chosen)
                self.recovery.verdict = None
            self.requests.forget_failure()
            if chosen is None or len(chosen) == self.world_size:
                self.history.clear()
            return
        self.history.clear()
        self._record.end()
        self.launcher.close()
        self.recovery.launcher = _make_launcher(self.options, self._on_background)
        try:
            with self._waiting("starting all ranks again"):
                self.launcher.start()
        except BaseException:
            self._forget()
            raise
        if self.options.keep:
            self._record.begin(self.launcher.folder, self.launcher.epoch)

    def _must_start_anew(self, which: Sequence[int]) -> bool:
        must = self.launcher.must_start_anew(which)
        self.check_open()  # what another process has just taken over seems to be gone as well
        return must

    def _moves(self, hosts: Mapping[str, str]) -> dict[int, str]:
        """The new host for each node that is to have another."""
        nodes = {host.name: host.node for host in self.hosts}
        return {nodes[name]: other for name, other in hosts.items() if other != name}

    def _sources(self, chosen: Sequence[int] | None) -> tuple[int, Sequence[int]]:
        """The rank to restore from, and those to restore."""
        dead = self.launcher.dead_ranks()
        fresh = sorted({*(self.ranks if chosen is None else chosen), *dead})
        healthy = [rank for rank in self.ranks if rank not in fresh]
        if not healthy:
            raise SessionStateError(
                "restore= copies from a rank that stays, and none does: "
                "session.restart() without restore= replaces all of them."
            )
        return healthy[0], fresh

    def preload(self, *names: str) -> tuple[str, ...]:
        """Import modules once on each host, so that ranks which are started later have them.

        Ranks that run stay as they are; ``restart()`` gives fresh ones, which share its memory.
        A process of its own tries each module first: where one does not import, or no rank could be
        started after it, nothing is changed.

        Args:
            *names: Of the modules, such as ``"transformers"``. Not of a file that you are still
                editing, for it is not read again.

        Returns:
            Those that were imported already.

        Raises:
            OptionsError: A module does not import, starts a thread, or uses a device.
            RunInterrupt: Ctrl-C.
            SessionStateError: The session's agent is gone.
        """
        self.check_open()
        if not names:
            raise OptionsError('preload() takes names of modules: preload("transformers").')
        wanted = replace(
            self.options, preload=tuple(dict.fromkeys((*self.options.preload, *names)))
        )
        with self._lifecycle, self._waiting(f"importing {', '.join(names)}"):
            known = self.launcher.check_preload(names)
            self.options = wanted
            self.option_sources["preload"] = "preload()"
            self.requests.import_hints.forget(names)
            self.launcher.preload(wanted)
        return known

    def close(self) -> None:
        """End all ranks and everything that belongs to them. Harmless when repeated."""
        if os.getpid() != self._owner:
            return
        with self._lifecycle, interrupts_held():
            if not self._ended:
                self._close_now()

    def _close_now(self) -> None:
        self._forget()
        self.launcher.close()

    def _forget(self, ended: str = CLOSED) -> None:
        self._ended = ended
        self._record.end()
        if self in _open:
            _open.remove(self)

    def activate(self) -> None:
        """Make this the session that ``%%distributed`` and :func:`current_session` use."""
        self.check_open()
        _open.remove(self)
        _open.append(self)

    def __enter__(self) -> Session:
        self.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for views --------------------------------------------------------------------------------

    def output(self, *, is_run: bool = True) -> Output:
        """A place for the output of one run, or for what comes between runs."""
        log = (lambda rank: self.launcher.log_place(rank, "stdout")) if is_run else None
        return _make_output(self._output, log, self.options)

    def _waiting(self, doing: str) -> ProgressNotice:
        return ProgressNotice(self.output(), doing, lambda: self.launcher.waits_for())

    def _on_background(self, message: Any) -> None:
        output = self.output(is_run=False)
        output.connect((message.rank,), self.launcher.channel)
        output.write(message)
        output.close()

    def check_open(self) -> None:
        """Refuse to go on with a session that is closed, or inherited by a forked process."""
        if refusal := self._ended or self.recovery.launcher.taken:
            raise SessionStateError(refusal)
        if os.getpid() != self._owner:
            raise SessionStateError(
                "this session belongs to the process that started it, and this is a forked copy."
            )


def _make_output(
    given: Callable[[], Output] | None,
    log: Callable[[int], str] | None,
    options: SessionOptions,
) -> Output:
    if given is not None:
        made = given()
        if not isinstance(made, Output):
            raise OptionsError(
                f"output= gives a {type(made).__name__}: derive it from "
                "distsession.view.Output, which drops what it is not told to show."
            )
        return made
    if output_factory is None:
        return Silent()
    made = output_factory(log)
    made.text_bars = options.text_bars
    return made


def _make_launcher(
    options: SessionOptions,
    on_background: Callable[[Any], None],
    attachment: Attachment | None = None,
) -> Launcher:
    if options.launcher == "inline":
        from distsession.cluster.inline import InlineLauncher

        return InlineLauncher(options)
    far = None if attachment is None else attachment.state.hosts
    # That of a session that is there: what this process says of hosts may be another one.
    plan = far.plan if far is not None else options.host_plan if attachment is None else None
    if plan is not None:
        from distsession.cluster.hosts_launcher import HostsLauncher

        return HostsLauncher(options, plan, on_background, attachment)
    from distsession.cluster.local import LocalLauncher

    return LocalLauncher(options, on_background, attachment)


def current_session() -> Session:
    """The session that was started or activated last and is still open.

    Raises:
        SessionStateError: There is none.
    """
    if not _open:
        raise SessionStateError(
            "no session is open: start one with Session(4) or %session start 4."
        )
    return _open[-1]


def _attached_to(folder: str) -> Session | None:
    """The open session of this process that has this folder; one that was taken away is let go."""
    for session in list(_open):
        if os.path.realpath(session.launcher.folder or "/") == os.path.realpath(folder):
            if not session.launcher.taken:
                return session
            session._detach_now()
    return None


def open_sessions() -> Sequence[Session]:
    """All open sessions, the current one last."""
    return tuple(_open)


@atexit.register
def _close_all() -> None:
    """As the interpreter ends; also beside a thread that is restarting a session."""
    with interrupts_held(forget=True):
        for session in list(_open):
            if os.getpid() == session._owner:
                if session.options.keep:
                    session._detach_now()
                else:
                    session._close_now()
