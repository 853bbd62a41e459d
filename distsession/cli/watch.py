"""``distsession attach``: what all ranks of a session that is kept write, as they write it."""

from __future__ import annotations

import contextlib
import importlib
import sys

from distsession import session as sessions
from distsession.cli.logs import tell_missing
from distsession.cluster.kept import KeptSession, find_kept
from distsession.kernel.kept_state import look_at
from distsession.kernel.kept_table import doing_text, owner_text
from distsession.kernel.log_tail import texts_of_all
from distsession.kernel.output import Output

__all__ = ["watch"]


def watch(name: str | None, *, lines: int) -> int:
    """Show what all ranks write, until Ctrl-C or the session's end; nobody of it notices.

    Args:
        name: Of the session.
        lines: How many lines of each rank that are there already come first.

    Returns:
        The exit code.

    Raises:
        KeptSessionError: There is no such session.
    """
    kept = find_kept(name, any_version=True)
    try:
        # First, as it imports: Python may end by a Ctrl-C in an import, although it is caught.
        with contextlib.closing(_make_output()) as output:
            state = look_at(kept)
            _tell(f"{kept}: {doing_text(state)}. Owner: {owner_text(kept)}. Ctrl-C leaves it.")
            _show_all(kept, lines, output)
    except KeyboardInterrupt:
        _tell(f"{kept} goes on.")
    else:
        _tell(f"{kept} has ended.")
    return 0


def _show_all(kept: KeptSession, lines: int, output: Output) -> None:
    for texts in texts_of_all(kept, lines, tell_missing):
        for text in texts:
            output.write(text)
        output.tick(lambda with_places: {})


def _make_output() -> Output:
    """The place for output that the package's face says."""
    importlib.import_module("distsession").Session  # noqa: B018
    assert sessions.output_factory is not None
    return sessions.output_factory(lambda rank: "")


def _tell(text: str) -> None:
    print(f"distsession: {text}", file=sys.stderr, flush=True)
