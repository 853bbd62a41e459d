"""The command line: ``distsession doctor`` and ``distsession run``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import distsession
from distsession.errors import DOCTOR_REMEDY
from distsession.options import add_arguments

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    parser = argparse.ArgumentParser(prog="distsession", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=distsession.__version__)
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser(
        "doctor", help="say what this machine has, what would go wrong, and the mend"
    )
    add_arguments(doctor)
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    runner = commands.add_parser("run", help="run a script on ranks of this machine")
    _add_run_arguments(runner)
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    command = given.pop("command", None)
    if command is None:
        parser.print_help()
        return 0
    # Neither is imported before: where a package is missing, it is the doctor who has to say so.
    if command == "doctor":
        from distsession.cli.doctor import examine

        try:
            return examine(given, as_json=given.pop("json"))
        except BrokenPipeError:  # as with `distsession doctor | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    try:
        from distsession.scripts.run import run
    except ImportError as error:
        print(f"distsession: {error}. {DOCTOR_REMEDY}", file=sys.stderr)
        return 1
    script, rest, plain = (given.pop(name) for name in ("script", "arguments", "plain"))
    return run(script, rest, given, plain=plain)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, ranks_flags=("-n", "--ranks", "--nproc-per-node", "--nproc_per_node"))
    parser.add_argument(
        "--plain", action="store_true", help="do not mark lines of output with their rank"
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="the script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
