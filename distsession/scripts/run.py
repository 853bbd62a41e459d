"""``distsession run SCRIPT.py``: a script on ranks of a session, from start to exit code."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distsession.cluster.pending import OutputMessage, PendingRequest
from distsession.display.widgets import Bars, Models
from distsession.engine.script import run_script
from distsession.errors import (
    DistsessionError,
    EngineDiedError,
    OptionsError,
    RunError,
    RunInterrupt,
)
from distsession.kernel.failures import collect
from distsession.kernel.notice_line import NoticeLine
from distsession.kernel.outcome import run_error
from distsession.kernel.output import NO_NOTICE, Notice, Silent
from distsession.protocol.messages import CommMessage, Display, Text
from distsession.session import Session

__all__ = ["exit_code", "run"]

LOOK = 0.05
"""Seconds between two looks at how the ranks are."""
LEAVE = 5.0
"""Seconds that ranks have to end once another has failed, on top of what a deadlock is given."""
STOP = 10.0
"""Seconds that ranks have to end after Ctrl-C."""
LAST_OUTPUT = 1.0
"""Seconds that the last output has after a signal; nobody may read it any more."""
INTERRUPTED = 130
HUNG_UP = 128 + signal.SIGHUP
USAGE = 2


class PlainOutput(Silent):
    """The ranks' output line by line, unmarked; what a script's cells show is dropped.

    A line that is not complete waits for its end, so that lines of several ranks do not mix.
    """

    def __init__(self) -> None:
        self._notice = NoticeLine()
        self._begun: dict[tuple[int, str], str] = {}
        self.is_file = not sys.stderr.isatty()
        self._models = Models()
        self._bars = Bars(self._models)

    def write(self, message: OutputMessage) -> None:
        """Take one piece of output of one rank."""
        if isinstance(message, Display):
            self._bars.show(message)
        elif isinstance(message, CommMessage):
            self._models.apply(message)
            for text in self._bars.take_ended(message.rank):
                self._put("stderr", f"{text}\n")
        elif isinstance(message, Text):
            source = message.rank, message.stream
            text = self._begun.pop(source, "") + message.text
            end = max(text.rfind("\n"), text.rfind("\r")) + 1
            self._put(message.stream, text[:end])
            if text[end:]:
                self._begun[source] = text[end:]

    def close(self) -> None:
        """The run is over, and with it what is left of lines."""
        for (_, stream), text in self._begun.items():
            self._put(stream, f"{text}\n" if len(self._begun) > 1 else text)
        self._begun.clear()
        for _, text in self._bars.take_all():
            self._put("stderr", f"{text}\n")
        self._notice.show(NO_NOTICE)

    def _put(self, name: str, text: str) -> None:
        self._notice.clear()
        stream = sys.stderr if name == "stderr" else sys.stdout
        stream.write(text)
        stream.flush()

    def notify(self, notice: Notice) -> None:
        """Show a line about the run that replaces the one before; it does not stay."""
        self._notice.show(notice)


def run(
    script: str, arguments: Sequence[str], options: Mapping[str, Any], *, plain: bool = False
) -> int:
    """Run a script on all ranks of a new session.

    Args:
        script: Its path.
        arguments: Its own arguments.
        options: Of the session.
        plain: Do not mark lines of output with their rank.

    Returns:
        The exit code: 0, or that of the first failure.
    """
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        return _say(f"there is no script {script}.", USAGE)
    if options.get("launcher") == "inline":
        return _say("a script is not run inline: `python SCRIPT.py` does that.", USAGE)
    try:
        with _signals_end_it(), _start(options, PlainOutput if plain else None) as session:
            return _run_or_leave(session, path, script, arguments)
    except OptionsError as error:
        return _say(str(error), USAGE)
    except DistsessionError as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted.", INTERRUPTED)


def _start(options: Mapping[str, Any], output: Callable[[], Any] | None) -> Session:
    # From the package's face, as a user's program would take it: it says where output goes.
    start = importlib.import_module("distsession").Session
    session: Session = start(output=output, **options)
    return session


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """A batch system's SIGTERM, or the end of a terminal, ends the run as Ctrl-C does."""

    def end(number: int, _: Any) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_or_leave(session: Session, path: str, script: str, arguments: Sequence[str]) -> int:
    """Run it; if the terminal goes meanwhile, and the session is kept, it goes on without us."""
    try:
        return _run(session, path, script, arguments)
    except SystemExit as end:
        if not _goes_on(session, end):
            raise
        with contextlib.suppress(OSError):  # where there is no terminal any more
            _say(f"{session.name} goes on: `distsession attach {session.name}` shows it.", HUNG_UP)
        return HUNG_UP


def _run(session: Session, path: str, script: str, arguments: Sequence[str]) -> int:
    session.requests.goes_on = False  # a script is over when it has failed
    future = session.submit(run_script, path, [script, *arguments])
    pending = next(iter(session.channel.pending()), None)
    try:
        return _wait(session, future, pending)
    except RunInterrupt as stop:
        return _say(str(stop), INTERRUPTED)
    except KeyboardInterrupt:
        return _stop(session, future)
    except RunError as error:
        return _fail(error)
    except DistsessionError as error:  # a hang
        return _say(str(error), 1)
    except SystemExit as end:
        if _goes_on(session, end):
            session.detach()
        else:
            session.close()
        # The thread that still shows output: Python aborts where it ends while one writes.
        concurrent.futures.wait([future], LAST_OUTPUT)
        raise


def _goes_on(session: Session, end: SystemExit) -> bool:
    """Whether the session stays when its terminal goes."""
    return end.code == HUNG_UP and bool(session.options.keep)


def _wait(
    session: Session, future: concurrent.futures.Future[Any], pending: PendingRequest | None
) -> int:
    """Wait for all ranks; not for long for ranks that go on when another has failed."""
    failed_at: float | None = None
    while True:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            future.result(timeout=LOOK)
            return 0
        if future.done() or pending is None:
            continue
        replies = dict(pending.replies)
        if not pending.deaths and not any(reply.error for reply, _ in replies.values()):
            continue
        failed_at = failed_at or time.monotonic()
        if time.monotonic() - failed_at > LEAVE + session.options.hang_grace:
            results, failed = collect(pending, 0.0, remedies=False)
            raise run_error(failed, results, session.infos)


def _stop(session: Session, future: concurrent.futures.Future[Any]) -> int:
    text = "interrupted."
    with contextlib.suppress(KeyboardInterrupt, DistsessionError):  # pressed again: do not wait
        session.interrupt()
        try:
            future.result(timeout=STOP)
        except RunInterrupt as stop:
            text = str(stop)
        except concurrent.futures.TimeoutError:
            pass
    return _say(text, INTERRUPTED)


# --- failures -------------------------------------------------------------------------------------


def _fail(error: RunError) -> int:
    first = error.first
    if isinstance(first, SystemExit):
        # Others may have failed for other reasons, or by what this one left undone.
        rank = error.first_rank
        if first.code is not None and not isinstance(first.code, int):
            _say(f"rank {rank}: {first.code}", 1)
        else:
            _say(f"rank {rank} ended with exit code {first.code}.", 1)
    else:
        _say("\n".join(error._render_traceback_()), 1)
    return exit_code(first)


def exit_code(error: BaseException) -> int:
    """What a process would have ended with that was ended by this error."""
    if isinstance(error, EngineDiedError):
        return 128 - error.returncode if error.returncode < 0 else error.returncode or 1
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return 1


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"distsession run: {text.rstrip()}\n")
    sys.stderr.flush()
    return code
