"""``distsession logs``: what a rank of a session that is kept writes."""

from __future__ import annotations

import contextlib
import sys
from typing import BinaryIO

from distsession.cluster.kept import find_kept
from distsession.errors import KeptSessionError
from distsession.kernel.log_tail import looks, open_tails
from distsession.ranks import select_ranks

__all__ = ["show_log", "tell_missing"]


def show_log(
    name: str | None, rank: int, *, follow: bool, stream: str, output: BinaryIO | None = None
) -> int:
    """Write the text of a rank to the terminal, as it is.

    Args:
        name: Of the session.
        rank: Which.
        follow: Go on with what comes until the session has ended.
        stream: ``"stdout"`` or ``"stderr"``.
        output: Where it is written. Default: stdout.

    Returns:
        The exit code.

    Raises:
        KeptSessionError: There is no such session, or it has no text of that rank.
        OptionsError: It has no such rank.
    """
    kept = find_kept(name, any_version=True)
    (rank,) = select_ranks(rank, kept.world_size)
    target = sys.stdout.buffer if output is None else output
    with contextlib.closing(open_tails(kept, [rank], [stream], miss=tell_missing)) as tails:
        if not tails.is_there:
            problem = tails.problem or "it has just begun"
            raise KeptSessionError(f"rank {rank} of {kept} has no log to show: {problem}.")
        for _ in looks(kept, follow):
            for _, _, data in tails.read():
                target.write(data)
            target.flush()
    return 0


def tell_missing(text: str) -> None:
    """Say in the terminal what is missing of a log."""
    print(f"distsession: {text}", file=sys.stderr)
