"""What the magics' own lines may say, and what is told of it."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import NoReturn

from distsession import options as session_options
from distsession.errors import OptionsError
from distsession.notebook.timeline import add_arguments
from distsession.parsing import Parser

__all__ = [
    "MagicParser",
    "cell_parser",
    "distributed_help",
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


class MagicParser(Parser):
    """A parser for magics: an error is shown as a line, and never ends the kernel."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        raise OptionsError(f"{message}{end} See {self.prog} --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown

    def hint(self, unknown: str) -> str:
        takes_ranks = any(action.dest == "ranks" for action in self._actions)
        if unknown.partition("=")[0] in RANKS_FLAGS and takes_ranks:
            return f": ranks are given without a flag, as in {self.prog} 0-1."
        return super().hint(unknown)


class _HelpShown(Exception):
    """``--help`` was asked for and has been printed."""


def parse(parser: MagicParser, line: str) -> argparse.Namespace | None:
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


def session_help(command: str | None = None) -> str:
    """All commands of ``%session``, or all that one of them takes."""
    parser = session_parser()
    if command is not None:
        return parser.commands[command].format_help()
    return f"{parser.format_help()}\n%session help COMMAND says what a command takes.\n"


def distributed_help() -> str:
    """All options of ``%%distributed``, and the form with one percent sign.

    Front ends do not always tell which of the two is asked about.
    """
    return f"{cell_parser().format_help()}\n{_EXPRESSION_HELP}"


# --- the parsers ----------------------------------------------------------------------------------


def session_parser() -> MagicParser:
    """Of ``%session``."""
    parser = MagicParser(prog="%session", description="Start, look at and end the session.")
    parser.also = {"stop": "close", "ls": "list"}
    parser.instead = {
        "panel": "a cell that ends in %session, or in a session, shows the panel.",
        "exec": "a cell that begins with %%distributed runs on the ranks.",
        "run": "a cell that begins with %%distributed runs on the ranks.",
        "logs": "%session output shows what ranks have written, and the panel their logs.",
        "kill": "%session close ends all ranks, %session restart 1 replaces one.",
    }
    commands = parser.add_subparsers(dest="verb", parser_class=MagicParser, metavar="COMMAND")
    helping = commands.add_parser("help", help="these commands, or all that one of them takes")
    helping.add_argument("command", nargs="?", choices=commands.choices, metavar="COMMAND")
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
    interrupt = commands.add_parser(
        "interrupt", help="raise KeyboardInterrupt in what runs on the ranks"
    )
    interrupt.add_argument(
        "--force", action="store_true", help="end it, also if its code catches that"
    )
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


def cell_parser() -> MagicParser:
    """Of the first line of ``%%distributed``."""
    parser = MagicParser(prog="%%distributed", description="Run the cell on the ranks.")
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
