"""``distsession exec``: code on the ranks of a session that is kept."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from typing import Any

from distsession.cluster.kept import KeptSession, find_kept
from distsession.errors import (
    DistsessionError,
    KeptSessionError,
    OptionsError,
    RunError,
    RunInterrupt,
)
from distsession.kernel.session_record import known_runs
from distsession.ranks import parse_ranks
from distsession.scripts.run import exit_code
from distsession.session import Session

__all__ = ["execute_in"]

INTERRUPTED = 130
"""Exit code by Ctrl-C, as shells have it."""


def execute_in(name: str, code: str, *, ranks: str | None = None, take: bool = False) -> int:
    """Attach to a session, run code on its ranks as a cell, and let go of it.

    Args:
        name: Of the session.
        code: The code, or the path of a file that has it, or ``-`` for the standard input.
        ranks: Where, as ``0,2`` or ``1-3``. Default: everywhere.
        take: Also if another process has the session, which then has it no longer; and if nobody
            has seen the end of what an earlier kernel has begun, which comes here then.

    Returns:
        The exit code: 0, or that of the first failure.

    Raises:
        DistsessionError: The session is not to be had.
    """
    source, label = _source(code)
    kept = find_kept(name)
    if not take and not kept.has_owner:
        _refuse_unseen(kept)
    # From the package's face, as a user's program would take it: it says where output goes.
    face: Any = importlib.import_module("distsession").Session
    session: Session = face.attach(kept.folder, take=take)
    try:
        view = session if ranks is None else session[parse_ranks(ranks, session.world_size)]
        view.execute(source, label=label)
        return 0
    except RunInterrupt as stop:
        return _tell(str(stop), INTERRUPTED)
    except RunError as error:
        return _tell("\n".join(error._render_traceback_()), exit_code(error.first))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        with contextlib.suppress(DistsessionError):  # somebody has taken it, or ended it
            session.detach()


def _refuse_unseen(kept: KeptSession) -> None:
    """What ends here is delivered here, and a notebook that attaches later would miss it.

    Raises:
        KeptSessionError: Something has been begun of which nobody has seen the end.
    """
    known = known_runs(kept.folder)
    unseen = [run.title for number, run in known.began.items() if number not in known.ended]
    if unseen:
        raise KeptSessionError(
            f"an earlier kernel has begun {', '.join(unseen)} in {kept}, and nobody has seen the "
            f"end of it. `%session attach {kept.name}` in a notebook goes on with it; `distsession "
            f"attach {kept.name}` shows its text; `distsession exec --take` takes what comes of it."
        )


def _source(code: str) -> tuple[str, str | None]:
    """The code, and what stands for its file in tracebacks.

    Raises:
        OptionsError: There is no such file, or it cannot be read.
    """
    if code == "-":
        return sys.stdin.read(), "stdin"
    try:
        if os.path.isfile(code):
            with open(code, encoding="utf-8") as file:
                return file.read(), os.path.basename(code)
    except (OSError, ValueError) as error:
        raise OptionsError(f"{code} cannot be read: {error}.") from None
    if re.fullmatch(r"[\w./~-]+\.py", code):
        raise OptionsError(f"there is no file {code}.")
    return code, None


def _tell(text: str, code: int) -> int:
    print(f"distsession: {text.rstrip()}", file=sys.stderr, flush=True)
    return code
