"""``distsession run --plain``."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from unittest.mock import Mock

import pytest

from distsession.kernel import notice_line
from distsession.kernel.output import NO_NOTICE, Notice
from distsession.notebook.terminal import TerminalOutput
from distsession.protocol.messages import Text
from distsession.scripts import run
from distsession.scripts.run import PlainOutput


def text(rank: int, text: str, stream: str = "stdout") -> Text:
    return Text(rank, 1, stream, text)


def test_lines_of_two_ranks_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    output = PlainOutput()
    for message in (text(0, "one "), text(1, "two "), text(0, "half\n"), text(1, "halves\nthree")):
        output.write(message)
    assert capsys.readouterr().out == "one half\ntwo halves\n"
    output.close()
    assert capsys.readouterr().out == "three"


def test_a_bar_is_shown_as_it_moves(capsys: pytest.CaptureFixture[str]) -> None:
    output = PlainOutput()
    output.write(text(0, "\r10%\r20%", "stderr"))
    assert capsys.readouterr().err == "\r10%\r"
    output.close()
    assert capsys.readouterr().err == "20%"


def test_what_several_ranks_left_open_is_put_on_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output = PlainOutput()
    for message in (text(0, "a"), text(1, "b"), text(0, "e", "stderr")):
        output.write(message)
    output.close()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a\nb\n", "e\n")


def pending(seconds: int) -> Notice:
    """What is told of a job whose reason changes with each look."""
    what = f"job 7 pending ({'Priority' if seconds % 2 else 'Resources'})"
    return Notice(what, f"{what} ({seconds} s)")


@pytest.mark.parametrize("make", [PlainOutput, TerminalOutput])
def test_a_file_gets_a_line_of_a_job_that_waits_and_not_each_change(
    make: type[PlainOutput | TerminalOutput],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("distsession.kernel.notice_line.time.monotonic", lambda: now)
    output = make()
    for seconds in range(1, 60):
        now = 1000.0 + seconds
        output.notify(pending(seconds))
    output.notify(NO_NOTICE)
    lines = ["(Priority) (1 s)", "(Resources) (2 s)"]
    assert capsys.readouterr().err == "".join(f"distsession: job 7 pending {n}\n" for n in lines)
    now += notice_line.AGAIN_AFTER_S
    output.notify(pending(120))
    assert capsys.readouterr().err == "distsession: job 7 pending (Resources) (120 s)\n"


def test_in_a_terminal_it_is_updated_in_place_and_makes_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    output = PlainOutput()
    output.notify(pending(1))
    output.notify(pending(2))
    shown = "\r\x1b[Kdistsession: job 7 pending "
    assert capsys.readouterr().err == f"{shown}(Priority) (1 s){shown}(Resources) (2 s)"
    output.write(text(0, "begun\n"))
    assert capsys.readouterr() == ("begun\n", "\r\x1b[K")
    output.notify(pending(3))
    output.close()
    assert capsys.readouterr().err == f"{shown}(Priority) (3 s)\r\x1b[K"


@pytest.mark.parametrize("keep", ["", "600"])
def test_a_run_whose_terminal_goes_waits_for_who_still_shows_output(
    monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    future: Future[None] = Future()
    ends = threading.Timer(0.2, future.set_result, [None])
    session = Mock(submit=Mock(return_value=future), channel=Mock(pending=Mock(return_value=[])))
    session.options.keep = keep
    session.detach.side_effect = session.close.side_effect = ends.start
    monkeypatch.setattr(run, "_wait", Mock(side_effect=SystemExit(run.HUNG_UP)))
    with pytest.raises(SystemExit):
        run._run(session, "train.py", "train.py", [])
    assert future.done()
    assert (session.detach.called, session.close.called) == (bool(keep), not keep)
