"""The command line: ``distsession doctor``, ``run``, and what sessions that are kept are told."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import distsession
from distsession.cli.hosts import add_host_arguments, take_plan
from distsession.errors import DOCTOR_REMEDY, DistsessionError, OptionsError
from distsession.options import add_arguments, split_launcher_options
from distsession.parsing import Parser

__all__ = ["main"]

USAGE = 2
INTERRUPTED = 130
"""Exit codes: what was asked for cannot be; and by Ctrl-C, as shells have it."""
_INSTEAD = {
    "top": "did you mean ls? It tells what each session does and uses.",
    "ps": "did you mean ls? It tells what each session does and uses.",
    "status": "did you mean ls, or diagnose?",
    "kill": "did you mean stop?",
    "end": "did you mean stop?",
    "output": "did you mean logs?",
    "tail": "did you mean logs -f?",
    "start": "a notebook starts a session, by %session start; `run` starts a script.",
    "launch": "did you mean run?",
    "restart": "a notebook replaces ranks, by %session restart.",
    "interrupt": "a notebook interrupts its ranks, by Stop or %session interrupt.",
}
"""What to type for words that are no commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    parser = Parser(prog="distsession", description=__doc__.splitlines()[0])
    parser.also, parser.instead = {"close": "stop", "list": "ls"}, _INSTEAD
    parser.add_argument("--version", action="version", version=distsession.__version__)
    commands = parser.add_subparsers(dest="verb", metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="say what this machine has, what would go wrong, and the mend"
    )
    add_arguments(doctor)
    add_host_arguments(doctor)
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    runner = commands.add_parser("run", help="run a script on ranks of this machine")
    _add_run_arguments(runner)
    _add_session_commands(commands)
    words, of_launcher = split_launcher_options(
        parser, sys.argv[1:] if arguments is None else arguments
    )
    given = {k: v for k, v in vars(parser.parse_args(words)).items() if v is not None}
    if of_launcher:
        given["launcher_options"] = {**given.get("launcher_options", {}), **of_launcher}
    verb = given.pop("verb", None)
    if verb is None:
        parser.print_help()
        return 0
    if verb == "run":
        return _run(given)
    try:
        return _examine(given) if verb == "doctor" else _on_session(verb, given)
    except BrokenPipeError:  # as with `distsession doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# What a command needs is imported with it: where a package is missing, it is the doctor who has to
# say so.


def _examine(given: dict[str, Any]) -> int:
    from distsession.cli.doctor import examine

    as_json = given.pop("json")
    try:
        plan = take_plan(given)
    except OptionsError as error:
        return _refuse(str(error), USAGE)
    try:
        return examine(given, hosts=plan, as_json=as_json)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(given: dict[str, Any]) -> int:
    try:
        from distsession.scripts.run import run
    except ImportError as error:
        return _refuse(f"{error}. {DOCTOR_REMEDY}", 1)
    script, rest, plain = (given.pop(name) for name in ("script", "arguments", "plain"))
    return run(script, rest, given, plain=plain)


def _on_session(command: str, given: dict[str, Any]) -> int:
    try:
        return _do_on_session(command, given.pop("name", None), **given)
    except ImportError as error:
        return _refuse(f"{error}. {DOCTOR_REMEDY}", 1)
    except OptionsError as error:
        return _refuse(str(error), USAGE)
    except DistsessionError as error:
        return _refuse("\n  ".join(error.lines), 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _do_on_session(command: str, name: Any, **given: Any) -> int:
    match command:
        case "attach":
            from distsession.cli.watch import watch

            return watch(name, **given)
        case "exec":
            from distsession.cli.execute import execute_in

            return execute_in(name, **given)
        case "logs":
            from distsession.cli.logs import show_log

            return show_log(name, **given)
    from distsession.cli import sessions

    match command:
        case "stop":
            return sessions.stop_session(name)
        case "diagnose":
            return sessions.diagnose_session(name, **given)
        case _:
            return sessions.list_sessions(**given)


def _refuse(text: str, code: int) -> int:
    print(f"distsession: {text}", file=sys.stderr)
    return code


# --- arguments ------------------------------------------------------------------------------------


def _add_session_commands(commands: Any) -> None:
    """The commands on sessions that are kept."""
    named = "of the session, or its pid or folder, as `distsession ls` shows them"
    only = f"{named}; not needed if there is only one"
    listing = commands.add_parser(
        "ls", help="list the sessions that are kept: who has them, what they do, what they use"
    )
    stop = commands.add_parser("stop", help="end a session that is kept, with its ranks")
    stop.add_argument("name", metavar="NAME", help=named)
    attach = commands.add_parser(
        "attach", help="watch what all ranks of a kept session write; Ctrl-C leaves it as it is"
    )
    attach.add_argument("name", metavar="NAME", nargs="?", help=only)
    attach.add_argument(
        "-n", "--lines", type=_count, default=10, metavar="LINES",
        help="how many lines of each rank that are there already come first (default: 10)",
    )  # fmt: skip
    execute = commands.add_parser("exec", help="run code on the ranks of a kept session, as a cell")
    execute.add_argument("name", metavar="NAME", help=named)
    execute.add_argument("code", metavar="CODE_OR_FILE", help="the code, a file, or - for stdin")
    execute.add_argument(
        "-r", "--ranks", metavar="RANKS", help="where: 0,2 or 1-3; else everywhere"
    )
    execute.add_argument(
        "--take",
        action="store_true",
        help="also if a kernel has it, or has begun what nobody has seen the end of",
    )
    logs = commands.add_parser(
        "logs", help="show what a rank of a session that is kept has written"
    )
    logs.add_argument("name", metavar="NAME", nargs="?", help=only)
    logs.add_argument(
        "-r", "--rank", type=int, default=0, metavar="RANK", help="which (default: 0)"
    )
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on until Ctrl-C or the session's end"
    )
    logs.add_argument(
        "--stderr",
        dest="stream",
        action="store_const",
        const="stderr",
        default="stdout",
        help="what it has written to stderr",
    )
    diagnosis = commands.add_parser(
        "diagnose", help="say what each rank of a session that is kept does, and who waits for whom"
    )
    diagnosis.add_argument("name", metavar="NAME", nargs="?", help=only)
    for parser in (listing, diagnosis):
        parser.add_argument("--json", dest="as_json", action="store_true", help="print it as JSON")


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError(text)
    return count


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, ranks_flags=("-n", "--ranks", "--nproc-per-node", "--nproc_per_node"))
    parser.usage = "%(prog)s [-n RANKS] [OPTIONS] SCRIPT.py ..."
    parser.add_argument(
        "--plain", action="store_true", help="do not mark lines of output with their rank"
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="the script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
