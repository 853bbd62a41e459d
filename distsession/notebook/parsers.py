"""What the magics' own lines may say, and what is told of it."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from distsession import options as session_options
from distsession.errors import OptionsError
from distsession.notebook.timeline import add_arguments

__all__ = [
    "Parser",
    "cell_parser",
    "distributed_help",
    "flags",
    "near",
    "parse",
    "session_help",
    "session_parser",
]

_EXPRESSION_HELP = """usage: %distributed EXPRESSION
       %distributed --diff EXPRESSION

Evaluate one expression on every rank of the current session: NAME = %distributed EXPRESSION keeps
the values, as RankResults. With --diff, say whether it is the same on all ranks, and where not.

Statements go into a cell that begins with %%distributed.
"""


RANKS_FLAGS = ("--rank", "--ranks", "--target", "--targets", "-t")
"""By which ranks are chosen elsewhere, as in ``%%px``."""


class Parser(argparse.ArgumentParser):
    """argparse for magics: an error is shown as a line, and never ends the kernel."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        raise OptionsError(f"{message}{end} See {self.prog} --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever; of a flag that is not known it is said which one is like it."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self._chosen(found)
            hint = near(unknown[0], flags(parser))
            if unknown[0].partition("=")[0] in RANKS_FLAGS and parser.takes_ranks:
                hint = f": ranks are given without a flag, as in {parser.prog} 0-1."
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    @property
    def takes_ranks(self) -> bool:
        return any(action.dest == "ranks" for action in self._actions)

    def _chosen(self, found: argparse.Namespace) -> Parser:
        """The parser of the command that a line has named."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(found, action.dest, None) or "")
                return self if chosen is None else chosen
        return self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in choices:
            raise argparse.ArgumentError(
                action,
                f"there is no {value!r}{near(str(value), choices)} It takes {', '.join(choices)}",
            )


class _HelpShown(Exception):
    """``--help`` was asked for and has been printed."""


def near(text: str, known: Sequence[str]) -> str:
    """Asks whether something like it was meant; ends the sentence where nothing is."""
    found = difflib.get_close_matches(text.partition("=")[0], known, n=2)
    return f": did you mean {' or '.join(found)}?" if found else "."


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """The long flags of a parser."""
    return [
        text for action in parser._actions for text in action.option_strings if text[:2] == "--"
    ]


def parse(parser: Parser, line: str) -> argparse.Namespace | None:
    """The line's arguments; None where the user asked for help. A comment may end it."""
    try:
        words, of_launcher = session_options.split_launcher_options(
            parser, shlex.split(_without_comment(line))
        )
        found: argparse.Namespace = parser.parse_args(words)
        if of_launcher:
            found.launcher_options = {**(found.launcher_options or {}), **of_launcher}
        return found
    except _HelpShown:
        return None
    except ValueError as error:  # an unclosed quote
        if isinstance(error, OptionsError):
            raise
        raise OptionsError(f"{parser.prog} {line}: {error}.") from None


def _without_comment(line: str) -> str:
    """The line up to a word that begins with ``#``, as in Python and in a shell."""
    for found in re.finditer(r"(?:^|\s)#", line):
        before = line[: found.start()]
        try:
            shlex.split(before)
        except ValueError:  # it is within quotes
            continue
        return before
    return line


# --- help -----------------------------------------------------------------------------------------


def session_help() -> str:
    """All commands of ``%session`` with all their options."""
    parser = session_parser()
    commands = (
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    )
    return "\n".join([parser.format_help(), *_helps(commands)])


def _helps(commands: Iterator[argparse.ArgumentParser]) -> Iterator[str]:
    """Those of commands that take something."""
    for command in commands:
        if any(not isinstance(action, argparse._HelpAction) for action in command._actions):
            yield command.format_help()


def distributed_help() -> str:
    """All options of ``%%distributed``, and the form with one percent sign.

    Front ends do not always tell which of the two is asked about.
    """
    return f"{cell_parser().format_help()}\n{_EXPRESSION_HELP}"


# --- the parsers ----------------------------------------------------------------------------------


def session_parser() -> Parser:
    """Of ``%session``."""
    parser = Parser(prog="%session", description="Start, look at and end the session.")
    commands = parser.add_subparsers(dest="verb", parser_class=Parser, metavar="COMMAND")
    commands.add_parser("help", help="all commands with all their options")
    start = commands.add_parser("start", help="start ranks")
    session_options.add_arguments(start)
    attach = commands.add_parser(
        "attach", help="take up a session that an earlier kernel has left, or look on at another's"
    )
    attach.add_argument(
        "name", nargs="?", help="of the session, or the pid of its agent; the only one by default"
    )
    attach.add_argument(
        "--take", action="store_true", help="also if another kernel has it, which then has it not"
    )
    view = commands.add_parser("view", help="look on at a session that is kept, and ask nothing")
    view.add_argument("name", nargs="?", help="as of attach")
    commands.add_parser("detach", help="let go of a session that is kept; its ranks go on")
    commands.add_parser("list", help="sessions that are kept: who has each, what it does and uses")
    commands.add_parser("status", help="one line on how it is (the default)")
    commands.add_parser("config", help="backend, world size, and where each rank is")
    commands.add_parser("devices", help="the device of each rank")
    restart = commands.add_parser("restart", help="fresh processes for all ranks, or for some")
    restart.add_argument("ranks", nargs="?", help="such as 1 or 0,2-3")
    restart.add_argument(
        "--restore", metavar="A,B", default="", help="variables to copy from a rank that stays"
    )
    restart.add_argument(
        "--hosts", metavar="HOSTS", default="",
        help="all ranks of these hosts: gpu2, or gpu2=gpu3 to put another one in its place",
    )  # fmt: skip
    preload = commands.add_parser(
        "preload", help="import modules once per host, for ranks that are started later"
    )
    preload.add_argument("modules", nargs="+", metavar="NAME", help="such as transformers")
    commands.add_parser("reconnect", help="connect the process group anew; variables stay")
    diagnose = commands.add_parser("diagnose", help="what each rank does, who waits for whom")
    diagnose.add_argument("--stacks", action="store_true", help="with the frames of each rank")
    output = commands.add_parser("output", help="show a cell's output again, more of it")
    output.add_argument(
        "cell", nargs="*", metavar="In N", help="the cell's number, such as 3; the last by default"
    )
    output.add_argument("--rank", metavar="R", help="whose, such as 1 or 0,2-3; all by default")
    output.add_argument(
        "--kernel", type=int, metavar="K", help="of an earlier kernel: 1 is the session's first"
    )
    output.add_argument(
        "--follow", action="store_true", help="of who only looks on: what comes, until Stop"
    )
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
    export.add_argument(
        "--hash-seeds",
        action="store_true",
        help="run it with other hashes of strings on each rank, as under torchrun",
    )
    return parser


def cell_parser() -> Parser:
    """Of the first line of ``%%distributed``."""
    parser = Parser(prog="%%distributed", description="Run the cell on the ranks.")
    parser.add_argument("ranks", nargs="?", help="such as 0 or 1-3; all by default")
    parser.add_argument(
        "--on", metavar="HOST", help="on the ranks of a host instead, or of some: gpu1,gpu2"
    )
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
