"""``distsession run --plain``."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from unittest.mock import Mock

import pytest

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
