"""``%session``, ``%distributed`` and ``%%distributed``."""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from IPython.core.magic import no_var_expand

from distsession import errors
from distsession import options as session_options
from distsession import session as session_module
from distsession import view as view_module
from distsession.cluster.kept import KeptSession, find_kept
from distsession.display.html import element
from distsession.errors import ExportWarning, OptionsError, SessionStateError
from distsession.export.script import parse_cells
from distsession.kernel import cells, outcome
from distsession.notebook import nbdistributed_magics
from distsession.notebook.automagic import SessionChecker
from distsession.notebook.autopx import AUTO_FLAG, AutoPx
from distsession.notebook.cell import make_output
from distsession.notebook.colors import shell_colors
from distsession.notebook.completion import RankCompleter
from distsession.notebook.name_hints import NameHints
from distsession.notebook.notes import Notes
from distsession.notebook.panel import make_panel
from distsession.notebook.parsers import (
    cell_parser,
    distributed_help,
    parse,
    session_help,
    session_parser,
)
from distsession.notebook.post_mortem import PostMortem
from distsession.notebook.running_cell import cell_number, cell_of_file, running_cell, running_line
from distsession.notebook.timeline import TimelineOutput
from distsession.notebook.wording import worded
from distsession.options import SessionOptions
from distsession.parsing import flags, near
from distsession.protocol.cells import parse_cell
from distsession.ranks import parse_ranks, ranks_text
from distsession.results import RankResults
from distsession.session import Session, Table, current_session
from distsession.view import RankView
from distsession.viewer import SessionViewer

__all__ = ["register", "unregister"]


SessionKind = TypeVar("SessionKind", Session, SessionViewer)


class Magics:
    """The magics of one IPython shell."""

    def __init__(self, shell: Any):
        self._shell = shell
        parsers = {"%%distributed": cell_parser, "%session": session_parser}
        self.auto = AutoPx(shell)
        self.completer = RankCompleter(shell, parsers, lambda: self.auto.is_on)
        self.hints = NameHints(shell)
        self._notes = Notes(shell)
        self._post_mortem = PostMortem(shell)
        self._checker = SessionChecker(shell)
        self._started: Session | None = None  # by %session start
        self._viewer: SessionViewer | None = None
        """What this notebook looks on at."""
        self._line: tuple[int, Session | SessionViewer, Table] | None = None
        """What is shown of a session that the magic gives, and in which cell."""

    def register(self) -> None:
        """Hook into the shell."""
        self.auto.register()
        self.completer.register()
        self.hints.register()
        self._notes.register()
        self._post_mortem.register()
        self._shell.prefilter_manager.register_checker(self._checker)
        formatter = self._shell.display_formatter.mimebundle_formatter
        for kind in (Session, SessionViewer):
            formatter.for_type(kind, self._bundle_of_session)

    def unregister(self) -> None:
        """Take the hooks away."""
        self.auto.unregister()
        self.completer.unregister()
        self.hints.unregister()
        self._notes.unregister()
        self._post_mortem.unregister()
        self._shell.prefilter_manager.unregister_checker(self._checker)
        for kind in (Session, SessionViewer):
            self._shell.display_formatter.mimebundle_formatter.pop(kind, None)

    def _with_line(self, session: SessionKind, text: str) -> SessionKind:
        """A session that the magic gives, of which the cell shows a line."""
        self._line = cell_number(self._shell), session, _text_table(text)
        return session

    def _bundle_of_session(self, session: Session | SessionViewer) -> dict[str, Any]:
        line, self._line = self._line, None
        if line is not None and line[:2] == (cell_number(self._shell), session):
            return line[2].bundle()
        return session._repr_mimebundle_()

    # --- %session ---------------------------------------------------------------------------------

    @no_var_expand
    def session(self, line: str) -> Any:
        """Start, look at and end the session: ``%session start 4 --backend gloo``."""
        if line.strip() in ("--help", "-h"):
            line = "help"
        arguments = parse(session_parser(), line)
        if arguments is None:
            return None
        verb = arguments.verb or "status"
        result: Any = getattr(self, f"_{verb}")(arguments)
        return result

    def _help(self, arguments: argparse.Namespace) -> None:
        sys.stdout.write(session_help(arguments.command))

    def _start(self, arguments: argparse.Namespace) -> Session:
        given = {k: v for k, v in vars(arguments).items() if k != "verb" and v is not None}
        wanted = session_options.resolve_options(given)
        old = self._started
        if old is not None and old.is_open:
            if _has_all(old.options, wanted):
                return self._with_line(
                    old, f"{old.status()}. It was running already; %session restart renews it."
                )
            raise SessionStateError(
                f"{old.status()}. It has {_differences(old, wanted)}. Close it first with %session "
                "close, which ends its ranks, and start again; or start a second one beside it "
                "with Session(...)."
            )
        self._started = Session(**given)
        self._end_looking()
        _say(_started_text(self._started))
        return self._with_line(self._started, self._started.status())

    def _attach(self, arguments: argparse.Namespace) -> Session | SessionViewer:
        if not arguments.take and _is_of_another_process(kept := find_kept(arguments.name)):
            return self._look_on(kept.folder)
        session = self._started = Session.attach(arguments.name, take=arguments.take)
        self._end_looking()
        _say(f"attached to {session.status()}")
        if calls := len(session.pending()):
            values = "values of a call" if calls == 1 else f"values of {calls} calls"
            _say(f"What the earlier kernel waited for, the {values}: current_session().pending()")
        session.follow(_say)
        return self._with_line(session, session.status())

    def _view(self, arguments: argparse.Namespace) -> SessionViewer:
        return self._look_on(arguments.name)

    def _look_on(self, name: str | None) -> SessionViewer:
        viewer = Session.view(name)
        self._end_looking()
        self._viewer = viewer
        _say(viewer.refusal)
        return self._with_line(viewer, viewer.status())

    def _end_looking(self) -> SessionViewer | None:
        viewer, self._viewer = self._viewer, None
        if viewer is not None:
            viewer.close()
        return viewer

    def _seen(self) -> Session | SessionViewer:
        """What this notebook looks on at, or its own session."""
        return self._viewer or current_session()

    def _owned(self) -> Session:
        """The session of which something can be asked."""
        try:
            return current_session()
        except SessionStateError:
            if self._viewer is None:
                raise
            raise SessionStateError(self._viewer.refusal) from None

    def _detach(self, _: argparse.Namespace) -> Table:
        if (viewer := self._end_looking()) is not None:
            return _text_table(viewer.status())
        session = current_session()
        session.detach()
        was_on, self.auto.is_on = self.auto.is_on, False
        return _text_table(
            f"{session.status()}; its ranks go on. %session attach {session.name} takes it up again"
            f"{'; %session auto is off' if was_on else ''}"
        )

    def _list(self, _: argparse.Namespace) -> Table:
        return Session.list()

    def _status(self, _: argparse.Namespace) -> Session | SessionViewer | Table:
        if self._viewer is not None:
            return self._with_line(self._viewer, self._viewer.status())
        try:
            session = current_session()
        except SessionStateError as error:
            return _text_table(str(error))
        mark = ". Plain cells go to the ranks: %session auto is on." if self.auto.is_on else ""
        return self._with_line(session, f"{session.status()}{mark}")

    def _config(self, _: argparse.Namespace) -> Table:
        return self._seen().show_config()

    def _devices(self, _: argparse.Namespace) -> Table:
        return self._seen().devices()

    def _restart(self, arguments: argparse.Namespace) -> Table:
        session = self._owned()
        ranks = parse_ranks(arguments.ranks, session.world_size) if arguments.ranks else None
        names = [name.strip() for name in arguments.restore.split(",") if name.strip()]
        moves = (part.partition("=") for part in arguments.hosts.split(",") if part.strip())
        hosts = {name.strip(): other.strip() or name.strip() for name, _, other in moves}
        before = {info.rank: info.pid for info in session.infos}
        session.restart(ranks, hosts=hosts, restore=names)
        fresh = [info.rank for info in session.infos if info.pid != before.get(info.rank)]
        return _text_table(f"{session.status()}. {_fresh_text(fresh, session.world_size, names)}")

    def _preload(self, arguments: argparse.Namespace) -> Table:
        modules = [name for part in arguments.modules for name in part.split(",") if name]
        known = self._owned().preload(*modules)
        new = [name for name in modules if name not in known]
        parts = []
        if known:
            be = "is" if len(known) == 1 else "are"
            parts.append(f"{', '.join(known)} {be} imported already.")
        if new:
            be, them = ("is", "it") if len(new) == 1 else ("are", "them")
            parts.append(
                f"{', '.join(new)} {be} imported once per host from now on: %session restart gives "
                f"{them} to the ranks."
            )
        return _text_table(" ".join(parts))

    def _diagnose(self, arguments: argparse.Namespace) -> Table:
        return self._seen().diagnose(stacks=arguments.stacks)

    def _output(self, arguments: argparse.Namespace) -> Table:
        session = self._seen()
        if arguments.follow:
            return self._follow(session)
        cell = parse_cell(" ".join(arguments.cell))
        ranks = parse_ranks(arguments.rank, session.world_size) if arguments.rank else None
        return session.show_output(cell, ranks, arguments.kernel)

    def _follow(self, session: Session | SessionViewer) -> Table:
        if not isinstance(session, SessionViewer):
            raise OptionsError(
                "--follow is for a notebook that only looks on (%session view): here the output "
                "of a cell comes below it by itself."
            )
        session.watch()
        return _text_table(session.status())

    def _debug(self, arguments: argparse.Namespace) -> None:
        self._owned().debug(arguments.rank)

    def _reconnect(self, _: argparse.Namespace) -> Table:
        session = self._owned()
        session.reconnect()
        return _text_table(session.status())

    def _interrupt(self, arguments: argparse.Namespace) -> Table:
        session = self._owned()
        if not session.interrupt(force=arguments.force):
            return _text_table("nothing was running.")
        return _text_table(session.recovery.interrupted_text())

    def _close(self, _: argparse.Namespace) -> Table:
        if (viewer := self._end_looking()) is not None:
            return _text_table(viewer.status())
        session = current_session()
        session.close()
        was_on, self.auto.is_on = self.auto.is_on, False
        return _text_table(session.status() + ("; %session auto is off" if was_on else ""))

    def _auto(self, arguments: argparse.Namespace) -> Table:
        if arguments.state == "on":
            self._owned()
        if arguments.state is not None:
            self.auto.is_on = arguments.state == "on"
        if self.auto.is_on:
            return _text_table(
                "auto is on: plain cells go to the ranks, except those with %%local."
            )
        return _text_table("auto is off: plain cells stay in the notebook.")

    def _export(self, arguments: argparse.Namespace) -> Table:
        names = [name.strip() for name in arguments.check.split(",") if name.strip()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ExportWarning)
            script = self._owned().export(
                arguments.path,
                None if arguments.cells is None else parse_cells(arguments.cells),
                slurm=arguments.slurm,
                check=names,
                tolerance=arguments.tolerance,
                hash_seeds=arguments.hash_seeds,
            )
        told = "".join(f"\nBut {each.message}" for each in caught)
        batch = f" and {script.with_suffix('.sbatch')}" if arguments.slurm else ""
        checked = f" It gives the same {', '.join(names)}." if names else ""
        return _text_table(f"wrote {script}{batch}.{checked}{told}")

    # --- %distributed -----------------------------------------------------------------------------

    @no_var_expand  # braces and dollars belong to the expression
    def distributed(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on the ranks, or evaluate one expression there."""
        if cell is None:
            if not line.strip():
                raise OptionsError("%distributed takes an expression: %distributed t.sum()")
            return self._evaluate(line.strip())
        return self._run_cell(line, cell)

    def _evaluate(self, line: str) -> Any:
        if line in ("--help", "-h", "--diff --help", "--diff -h"):
            sys.stdout.write(distributed_help())
            return None
        label = self._label()
        above = "\n" * (running_line(self._shell) - 1)  # so that its line is that of the cell
        flag, _, expression = line.partition(" ")
        _check_expression(line if flag != "--diff" else expression)
        if flag != "--diff":
            return self._owned().evaluate(above + line, label=label)
        if not expression.strip():
            raise OptionsError("--diff takes an expression: %distributed --diff model")
        return self._owned().diff(above + expression, label=label)

    def _run_cell(self, line: str, cell: str) -> None:
        is_automatic = line.strip() == AUTO_FLAG
        if is_automatic:
            line = ""
        arguments = parse(cell_parser(), line)
        if arguments is None:
            return
        if arguments.out is not None and not arguments.out.isidentifier():
            raise OptionsError(f"--out takes the name of a variable, not {arguments.out!r}.")
        pushed = self._variables_to_push(arguments.push)
        pulled = _names("--pull", arguments.pull)
        session = self._owned()
        view = _view(session, arguments.ranks, arguments.on)
        label = self._label()
        timeline_output = TimelineOutput(arguments, view, label)
        if pushed:
            view.push(pushed)
        if is_automatic:
            where = ranks_text(view.ranks)
            sys.stdout.write(f"on {where} (%session auto is on; %%local keeps a cell here)\n")
            sys.stdout.flush()
        # The magic's own line stays as a comment, so that line numbers are those of the cell that
        # the user sees. A cell magic below it must come first to be one.
        is_bare = is_automatic or cell.lstrip().startswith("%%")
        source = cell if is_bare else f"# %%distributed {line}\n{cell}"
        try:
            results = view.execute(
                source,
                fetch=arguments.out is not None,
                timeout=arguments.timeout,
                label=label,
                profile=timeline_output.profile,
                debug=parse_ranks(arguments.debug, session.world_size) if arguments.debug else (),
            )
            if arguments.out is not None:
                self._assign(arguments.out, results)
            if pulled:
                self._pull(view, pulled)
        except BaseException:
            timeline_output.show(failed=True)
            raise
        timeline_output.show()

    def _label(self) -> str:
        """What the ranks call the cell that runs."""
        return self._owned().requests.names.name(cell_number(self._shell))

    def _pull(self, view: RankView, names: Sequence[str]) -> None:
        brought = view.pull(*names)
        for name in names:
            values = {r: v[name] for r, v in brought.items()} if len(names) > 1 else brought
            results = RankResults(values, duration=brought.duration)
            results.expression = name
            self._assign(name, results)

    def _variables_to_push(self, text: str) -> dict[str, Any]:
        names = _names("--push", text)
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise OptionsError(
                f"--push {text}: the notebook has no {', '.join(missing)}. Nothing was run."
            )
        return {name: self._shell.user_ns[name] for name in names}

    def _assign(self, name: str, results: RankResults[Any] | None) -> None:
        self._shell.user_ns[name] = results

    # --- ipyparallel's own ------------------------------------------------------------------------

    def px(self, line: str, cell: str | None = None) -> Any:
        """Run ipyparallel's %px or %%px, on the engines of the current session."""
        from distsession.cluster.ipyparallel import px_magic

        return px_magic(self._shell, self._owned().client, line, cell)


def _is_of_another_process(kept: KeptSession) -> bool:
    return kept.has_owner and kept.owner is not None and kept.owner.pid != os.getpid()


def _view(session: Session, ranks: str | None, hosts: str | None) -> RankView:
    if hosts is not None:
        if ranks is not None:
            raise OptionsError(f"give ranks, as in {ranks}, or --on {hosts}, not both.")
        return session.on(*(host.strip() for host in hosts.split(",") if host.strip()))
    return session[:] if ranks is None else session[parse_ranks(ranks, session.world_size)]


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not name.isidentifier():
            raise OptionsError(f"{flag} takes names of variables, such as x,y, not {name!r}.")
    return names


def _check_expression(text: str) -> None:
    """Say it here, in a line, where something is a statement, or a flag of the other magic."""
    flag = text.split()[0] if text.strip() else ""
    if flag in flags(cell_parser()):
        raise OptionsError(f"%distributed takes no {flag}: %%distributed does, above a cell.")
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        if re.match("--[a-z]", flag):
            hint = near(flag, ["--diff", "--help"])
            raise OptionsError(
                f"unrecognized arguments: {flag}{hint} See %distributed --help."
            ) from None
        if _is_statement(text):
            raise OptionsError(
                f"{text.strip()} is a statement, and %distributed takes an expression: write it "
                "into a cell that begins with %%distributed."
            ) from None


def _is_statement(text: str) -> bool:
    try:
        return bool(ast.parse(text.strip()).body)
    except (SyntaxError, ValueError):
        return False


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _has_all(options: SessionOptions, wanted: SessionOptions) -> bool:
    """Whether a session that has these options is as wanted; %session preload has added to them."""
    return replace(options, preload=wanted.preload) == wanted and (
        set(wanted.preload) <= set(options.preload)
    )


def _differences(session: Session, wanted: SessionOptions) -> str:
    """In what the options of a session are not those that are asked for now."""
    found = []
    for option in fields(SessionOptions):
        has, asked = getattr(session.options, option.name), getattr(wanted, option.name)
        if option.name == "preload":
            has, asked = ", ".join(has) or None, ", ".join(asked) or None
        if option.name == "ranks":
            has = session.world_size
        if has != asked:
            found.append(f"{option.name} {_option_text(has)}, not {_option_text(asked)}")
    return "; ".join(found)


def _option_text(value: object) -> str:
    return "by default" if value is None else str(value)


def _started_text(session: Session) -> str:
    """Where the ranks are that have been started, and on which devices."""
    backend = session.infos[0].backend_text
    places: dict[tuple[str, str], list[int]] = {}
    for info in session.infos:
        places.setdefault((info.host, str(info.device.device)), []).append(info.rank)
    told = ", ".join(
        f"{ranks_text(ranks)} on {host}, {device}" for (host, device), ranks in places.items()
    )
    return f"started {told}; backend {backend}"


def _fresh_text(fresh: Sequence[int], world: int, restored: Sequence[str]) -> str:
    """What has become of the variables of ranks that were replaced."""
    who = "All ranks" if len(fresh) == world else ranks_text(fresh).capitalize()
    are, their = ("is", "its") if len(fresh) == 1 and world > 1 else ("are", "their")
    but = f", but for {', '.join(restored)}, which were restored" if restored else ""
    kept = "" if len(fresh) == world else " The other ranks keep theirs."
    return f"{who} {are} fresh: {their} variables are gone{but}.{kept}"


def _text_table(text: str) -> Table:
    text = worded(text)
    return Table(text, element("pre", text))


_NAMES: Sequence[tuple[str, Sequence[str]]] = (
    ("session", ("line",)),
    ("distributed", ("line", "cell")),
    ("px", ("line", "cell")),
)


_HELP = {
    ("session", "line"): session_help,
    ("distributed", "line"): distributed_help,
    ("distributed", "cell"): distributed_help,
}


def _with_help(function: Any, text: str) -> Any:
    """The same magic, of which ``?`` tells what there is."""

    @functools.wraps(function)
    def magic(*args: str) -> Any:
        return function(*args)

    magic.__doc__ = text
    magic.__self__ = function.__self__  # type: ignore[attr-defined]  # whose it is
    return magic


def register(shell: Any) -> None:
    """Add the magics to a shell. ``%px`` is left alone where the user has ipyparallel's own."""
    unregister(shell)
    session_module.output_factory = make_output
    session_module.panel_factory = make_panel
    view_module.running_cell = running_cell
    errors.wording = worded
    outcome.error_colors = shell_colors
    cells.cell_of_file = cell_of_file
    magics = Magics(shell)
    present = shell.magics_manager.magics
    for name, kinds in _NAMES:
        for kind in kinds:
            if name == "px" and name in present[kind]:
                continue
            function = getattr(magics, name)
            if name != "px":
                function = _with_help(function, _HELP[name, kind]())
            shell.register_magic_function(function, kind, name)
    magics.register()
    nbdistributed_magics.register(shell)


def unregister(shell: Any) -> None:
    """Take the magics away again."""
    nbdistributed_magics.unregister(shell)
    present = shell.magics_manager.magics
    owners: dict[int, Magics] = {}
    for name, kinds in _NAMES:
        for kind in kinds:
            magics = getattr(present[kind].get(name), "__self__", None)
            if isinstance(magics, Magics):
                owners[id(magics)] = magics
                del present[kind][name]
    for magics in owners.values():
        magics.unregister()
