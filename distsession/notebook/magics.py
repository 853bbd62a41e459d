"""``%session``, ``%distributed`` and ``%%distributed``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from IPython.core.magic import no_var_expand

from distsession import options as session_options
from distsession import session as session_module
from distsession import view as view_module
from distsession.display.html import element
from distsession.errors import OptionsError, SessionStateError
from distsession.export.script import parse_cells
from distsession.kernel import outcome
from distsession.notebook import other_magics
from distsession.notebook.automagic import SessionChecker
from distsession.notebook.autopx import AUTO_FLAG, AutoPx
from distsession.notebook.cell import make_output
from distsession.notebook.colors import shell_colors
from distsession.notebook.completion import RankCompleter
from distsession.notebook.hints import NameHints
from distsession.notebook.panel import make_panel
from distsession.notebook.running_cell import cell_number, running_cell, running_line
from distsession.notebook.timeline import TimelineOutput, add_arguments
from distsession.protocol.cells import cell_name, parse_cell
from distsession.ranks import parse_ranks, ranks_text
from distsession.results import RankResults
from distsession.session import Session, Table, current_session
from distsession.view import RankView

__all__ = ["register", "unregister"]


class _Parser(argparse.ArgumentParser):
    """argparse for magics: an error is shown as a line, and never ends the kernel."""

    def error(self, message: str) -> NoReturn:
        raise OptionsError(f"{message}. See {self.prog} --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown


class _HelpShown(Exception):
    """``--help`` was asked for and has been printed."""


def _session_parser() -> _Parser:
    parser = _Parser(prog="%session", description="Start, look at and end the session.")
    commands = parser.add_subparsers(dest="command", parser_class=_Parser, metavar="COMMAND")
    start = commands.add_parser("start", help="start ranks")
    session_options.add_arguments(start)
    commands.add_parser("status", help="one line on how it is (the default)")
    commands.add_parser("config", help="backend, world size, and where each rank is")
    commands.add_parser("devices", help="the device of each rank")
    restart = commands.add_parser("restart", help="fresh processes for all ranks, or for some")
    restart.add_argument("ranks", nargs="?", help="such as 1 or 0,2-3")
    restart.add_argument(
        "--restore", metavar="A,B", default="", help="variables to copy from a rank that stays"
    )
    commands.add_parser("reconnect", help="connect the process group anew; variables stay")
    diagnose = commands.add_parser("diagnose", help="what each rank does, who waits for whom")
    diagnose.add_argument("--stacks", action="store_true", help="with the frames of each rank")
    output = commands.add_parser("output", help="show a cell's output again, more of it")
    output.add_argument(
        "cell", nargs="*", metavar="In N", help="the cell's number, such as 3; the last by default"
    )
    output.add_argument("--rank", metavar="R", help="whose, such as 1 or 0,2-3; all by default")
    debug = commands.add_parser("debug", help="open the debugger where a rank has failed")
    debug.add_argument("rank", nargs="?", type=int, help="the one that failed first by default")
    commands.add_parser("interrupt", help="raise KeyboardInterrupt in what runs on the ranks")
    commands.add_parser("close", help="end all ranks")
    auto = commands.add_parser("auto", help="send plain cells to the ranks, too")
    auto.add_argument("state", choices=("on", "off"), nargs="?", help="without it: how it is")
    export = commands.add_parser("export", help="write what ran on the ranks as a script")
    export.add_argument("path", help="the script, such as train.py")
    export.add_argument("--cells", metavar="3-5,f", help="which cells, and calls of which function")
    export.add_argument("--slurm", action="store_true", help="write a Slurm batch file, too")
    export.add_argument(
        "--check", metavar="A,B", default="", help="run it, and compare these variables"
    )
    export.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="by how much they may differ"
    )
    return parser


def _cell_parser() -> _Parser:
    parser = _Parser(prog="%%distributed", description="Run the cell on the ranks.")
    parser.add_argument("ranks", nargs="?", help="such as 0 or 1-3; all by default")
    parser.add_argument("--out", metavar="NAME", help="keep the last expression's values as NAME")
    parser.add_argument(
        "--push", metavar="A,B", default="", help="variables of the notebook to set there first"
    )
    parser.add_argument(
        "--pull", metavar="A,B", default="", help="variables to bring back, as RankResults"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds after which the cell is stopped"
    )
    parser.add_argument(
        "--debug", metavar="RANKS", help="ranks whose debugger opens at the first line"
    )
    add_arguments(parser)
    return parser


def _parse(parser: _Parser, line: str) -> argparse.Namespace | None:
    """The line's arguments; None where the user asked for help."""
    try:
        return parser.parse_args(shlex.split(line))
    except _HelpShown:
        return None
    except ValueError as error:  # an unclosed quote
        raise OptionsError(f"{parser.prog} {line}: {error}.") from None


class Magics:
    """The magics of one IPython shell."""

    def __init__(self, shell: Any):
        self._shell = shell
        parsers = {"%%distributed": _cell_parser, "%session": _session_parser}
        self.auto = AutoPx(shell)
        self.completer = RankCompleter(shell, parsers, lambda: self.auto.is_on)
        self.hints = NameHints(shell)
        self._checker = SessionChecker(shell)
        self._started: Session | None = None  # by %session start
        self._line: tuple[int, Session, Table] | None = None
        """What is shown of a session that the magic gives, and in which cell."""

    def register(self) -> None:
        """Hook into the shell."""
        self.auto.register()
        self.completer.register()
        self.hints.register()
        self._shell.prefilter_manager.register_checker(self._checker)
        formatter = self._shell.display_formatter.mimebundle_formatter
        formatter.for_type(Session, self._bundle_of_session)

    def unregister(self) -> None:
        """Take the hooks away."""
        self.auto.unregister()
        self.completer.unregister()
        self.hints.unregister()
        self._shell.prefilter_manager.unregister_checker(self._checker)
        self._shell.display_formatter.mimebundle_formatter.pop(Session, None)

    def _with_line(self, session: Session, text: str) -> Session:
        """A session that the magic gives, of which the cell shows a line."""
        self._line = cell_number(self._shell), session, _text_table(text)
        return session

    def _bundle_of_session(self, session: Session) -> dict[str, Any]:
        line, self._line = self._line, None
        if line is not None and line[:2] == (cell_number(self._shell), session):
            return line[2].bundle()
        return session._repr_mimebundle_()

    # --- %session ---------------------------------------------------------------------------------

    @no_var_expand
    def session(self, line: str) -> Any:
        """Start, look at and end the session: ``%session start 4 --backend gloo``."""
        arguments = _parse(_session_parser(), line)
        if arguments is None:
            return None
        command = arguments.command or "status"
        result: Any = getattr(self, f"_{command}")(arguments)
        return result

    def _start(self, arguments: argparse.Namespace) -> Session:
        given = {k: v for k, v in vars(arguments).items() if k != "command" and v is not None}
        wanted = session_options.resolve_options(given)
        old = self._started
        if old is not None and old.is_open:
            if old.options == wanted:
                return self._with_line(
                    old, f"{old.status()}. It was running already; %session restart renews it."
                )
            raise SessionStateError(
                f"{old.status()}. Close it first with %session close, or start a second one "
                "beside it with Session(...)."
            )
        self._started = Session(**given)
        return self._with_line(self._started, self._started.status())

    def _status(self, _: argparse.Namespace) -> Session | Table:
        try:
            session = current_session()
        except SessionStateError as error:
            return _text_table(str(error))
        mark = ". Plain cells go to the ranks: %session auto is on." if self.auto.is_on else ""
        return self._with_line(session, f"{session.status()}{mark}")

    def _config(self, _: argparse.Namespace) -> Table:
        return current_session().show_config()

    def _devices(self, _: argparse.Namespace) -> Table:
        return current_session().devices()

    def _restart(self, arguments: argparse.Namespace) -> Table:
        session = current_session()
        ranks = parse_ranks(arguments.ranks, session.world_size) if arguments.ranks else None
        names = [name.strip() for name in arguments.restore.split(",") if name.strip()]
        session.restart(ranks, restore=names)
        return _text_table(session.status())

    def _diagnose(self, arguments: argparse.Namespace) -> Table:
        return current_session().diagnose(stacks=arguments.stacks)

    def _output(self, arguments: argparse.Namespace) -> Table:
        session = current_session()
        cell = parse_cell(" ".join(arguments.cell))
        ranks = parse_ranks(arguments.rank, session.world_size) if arguments.rank else None
        return session.show_output(cell, ranks)

    def _debug(self, arguments: argparse.Namespace) -> None:
        current_session().debug(arguments.rank)

    def _reconnect(self, _: argparse.Namespace) -> Table:
        session = current_session()
        session.reconnect()
        return _text_table(session.status())

    def _interrupt(self, _: argparse.Namespace) -> Table:
        hit = current_session().interrupt()
        return _text_table("interrupted." if hit else "nothing was running.")

    def _close(self, _: argparse.Namespace) -> Table:
        session = current_session()
        session.close()
        was_on, self.auto.is_on = self.auto.is_on, False
        return _text_table(session.status() + ("; %session auto is off" if was_on else ""))

    def _auto(self, arguments: argparse.Namespace) -> Table:
        if arguments.state == "on":
            current_session()
        if arguments.state is not None:
            self.auto.is_on = arguments.state == "on"
        if self.auto.is_on:
            return _text_table(
                "auto is on: plain cells go to the ranks, except those with %%local."
            )
        return _text_table("auto is off: plain cells stay in the notebook.")

    def _export(self, arguments: argparse.Namespace) -> Table:
        names = [name.strip() for name in arguments.check.split(",") if name.strip()]
        script = current_session().export(
            arguments.path,
            None if arguments.cells is None else parse_cells(arguments.cells),
            slurm=arguments.slurm,
            check=names,
            tolerance=arguments.tolerance,
        )
        batch = f" and {script.with_suffix('.sbatch')}" if arguments.slurm else ""
        checked = f" It gives the same {', '.join(names)}." if names else ""
        return _text_table(f"wrote {script}{batch}.{checked}")

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
        label = cell_name(cell_number(self._shell))
        above = "\n" * (running_line(self._shell) - 1)  # so that its line is that of the cell
        flag, _, expression = line.partition(" ")
        if flag != "--diff":
            return current_session().evaluate(above + line, label=label)
        if not expression.strip():
            raise OptionsError("--diff takes an expression: %distributed --diff model")
        return current_session().diff(above + expression, label=label)

    def _run_cell(self, line: str, cell: str) -> None:
        is_automatic = line.strip() == AUTO_FLAG
        if is_automatic:
            line = ""
        arguments = _parse(_cell_parser(), line)
        if arguments is None:
            return
        if arguments.out is not None and not arguments.out.isidentifier():
            raise OptionsError(f"--out takes the name of a variable, not {arguments.out!r}.")
        pushed = self._variables_to_push(arguments.push)
        pulled = _names("--pull", arguments.pull)
        session = current_session()
        view = _view(session, arguments.ranks)
        label = cell_name(cell_number(self._shell))
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

    def _pull(self, view: RankView, names: Sequence[str]) -> None:
        brought = view.pull(*names)
        for name in names:
            values = {r: v[name] for r, v in brought.items()} if len(names) > 1 else brought
            self._assign(name, RankResults(values, duration=brought.duration))

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

        return px_magic(self._shell, current_session().client, line, cell)


def _view(session: Session, ranks: str | None) -> RankView:
    return session[:] if ranks is None else session[parse_ranks(ranks, session.world_size)]


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not name.isidentifier():
            raise OptionsError(f"{flag} takes names of variables, such as x,y, not {name!r}.")
    return names


def _text_table(text: str) -> Table:
    return Table(text, element("pre", text))


_NAMES: Sequence[tuple[str, Sequence[str]]] = (
    ("session", ("line",)),
    ("distributed", ("line", "cell")),
    ("px", ("line", "cell")),
)


def register(shell: Any) -> None:
    """Add the magics to a shell. ``%px`` is left alone where the user has ipyparallel's own."""
    unregister(shell)
    session_module.output_factory = make_output
    session_module.panel_factory = make_panel
    view_module.running_cell = running_cell
    outcome.error_colors = shell_colors
    magics = Magics(shell)
    present = shell.magics_manager.magics
    for name, kinds in _NAMES:
        for kind in kinds:
            if name == "px" and name in present[kind]:
                continue
            shell.register_magic_function(getattr(magics, name), kind, name)
    magics.register()
    other_magics.register(shell)


def unregister(shell: Any) -> None:
    """Take the magics away again."""
    other_magics.unregister(shell)
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
