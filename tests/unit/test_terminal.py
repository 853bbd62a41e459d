"""The ranks' output: whole lines, each marked with its rank."""

from __future__ import annotations

import contextlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.kernel.output import Notice
from distsession.notebook import terminal
from distsession.notebook.terminal import TerminalOutput
from distsession.protocol.messages import ClearOutput, Display, Text


def printed(capsys: pytest.CaptureFixture[str], *messages: Text | Display | ClearOutput) -> str:
    output = TerminalOutput()
    for message in messages:
        output.write(message)
    output.close()
    out, err = capsys.readouterr()
    assert err == ""
    return out


def out(rank: int, text: str) -> Text:
    return Text(rank, 1, "stdout", text)


def test_each_line_is_marked_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, out(0, "a\nb\n"), out(12, "c\n"))
    assert text == "[0] a\n[0] b\n[12] c\n"


def test_ranks_that_write_at_once_do_not_tear_lines(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [out(0, "loss "), out(1, "loss 2"), out(0, "1"), out(1, "\nx\n"), out(0, "\n")]
    assert printed(capsys, *pieces) == "[1] loss 2\n[1] x\n[0] loss 1\n"


def test_the_two_streams_of_a_rank_do_not_tear_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output = TerminalOutput()
    output.write(out(0, "half "))
    output.write(Text(0, 1, "stderr", "oops\n"))
    output.write(out(0, "whole\n"))
    output.close()
    assert capsys.readouterr() == ("[0] half whole\n", "[0] oops\n")


def test_a_last_line_without_an_end_is_written_when_the_run_is_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = TerminalOutput()
    output.write(out(1, "unfinished"))
    output.write(Text(0, 1, "stderr", "also"))
    assert capsys.readouterr() == ("", "")
    output.close()
    assert capsys.readouterr() == ("[1] unfinished\n", "[0] also\n")


def test_what_comes_too_soon_after_other_text_is_written_at_the_next_look(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "FLUSH_INTERVAL_S", 600)
    output = TerminalOutput()
    output.write(out(0, "x\n"))
    assert capsys.readouterr().out == ""
    output.tick(lambda with_places: {})
    assert capsys.readouterr().out == "[0] x\n"


def test_closing_twice_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    output = TerminalOutput()
    output.write(out(0, "x"))
    output.close()
    output.close()
    assert capsys.readouterr().out == "[0] x\n"


def test_of_a_progress_bar_only_the_last_state_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = [out(0, "\r10%"), out(1, "\r15%"), out(0, "\r20%"), out(0, "\r100%\n")]
    assert printed(capsys, *pieces) == "[0] 100%\n[1] 15%\n"


def test_a_great_deal_of_output_is_complete_and_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, *(out(i % 2, f"{i} {'x' * 50}\n") for i in range(5000)))
    lines = text.splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(5000))


@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab\n", max_size=6)), max_size=12))
def test_what_each_rank_wrote_can_be_read_back_from_its_marks(
    pieces: list[tuple[int, str]],
) -> None:
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        output = TerminalOutput()
        for rank, text in pieces:
            output.write(out(rank, text))
        output.close()
    lines = written.getvalue().splitlines()
    for rank in range(3):
        mine = "".join(text for number, text in pieces if number == rank)
        marked = [line.removeprefix(f"[{rank}] ") for line in lines if line[1] == str(rank)]
        assert marked == mine.splitlines()


def test_a_bar_within_a_bar_is_written_once_below_the_lines_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bars = "\router: {}0%\n\rinner: 50%\x1b[A"
    steps = [f"{bars.format(n)}\r          \rstep {n}\n" for n in range(3)]
    lines = printed(capsys, *(out(1, step) for step in steps), out(1, bars.format(3))).splitlines()
    expected = ["[1] step 0", "[1] step 1", "[1] step 2", "[1] outer: 30%", "[1] inner: 50%"]
    assert lines == expected


def test_a_line_that_changes_later_is_written_again(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, out(0, "a 1\nb 1\n"), out(0, "\x1b[2Aa 2\nb 1\n"), out(0, "c\n"))
    assert text == "[0] a 1\n[0] b 1\n[0] a 2\n[0] c\n"


def test_a_display_comes_after_the_lines_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    table = Display(1, 1, {"text/plain": "<table>", "text/html": "<b>"}, {})
    text = printed(capsys, out(0, "before\n"), table, out(0, "after\n"))
    assert text == "[0] before\n[rank 1] <table>\n[0] after\n"


def test_a_display_without_text_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    picture = Display(0, 1, {"image/png": b"\x89"}, {})
    assert printed(capsys, picture) == "[rank 0] <image/png>\n"


def test_clearing_the_output_leaves_a_terminal_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, out(0, "kept\n"), ClearOutput(0, 1, wait=False)) == "[0] kept\n"


def test_values_are_shown_after_the_output_and_folded(capsys: pytest.CaptureFixture[str]) -> None:
    output = TerminalOutput()
    output.write(out(0, "partial"))
    values = {0: "3", 1: "3", 2: "[1,\n 2]"}
    output.show({rank: ({"text/plain": text}, {}) for rank, text in values.items()})
    output.close()
    expected = "[0] partial\n[ranks 0-1] 3\n[rank 2]\n[1,\n 2]\n"
    assert capsys.readouterr().out == expected


def test_a_notice_is_written_once_however_long_it_lasts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = TerminalOutput()
    for seconds in (1, 2, 3):
        output.notify(Notice("rank 1 waits", f"rank 1 waits ({seconds} s)"))
    output.notify(Notice("rank 2 waits", "rank 2 waits (4 s)"))
    output.close()
    notices = "distsession: rank 1 waits (1 s)\ndistsession: rank 2 waits (4 s)\n"
    assert capsys.readouterr().err == notices


def test_a_notice_is_written_again_if_it_names_another_thing_that_looks_like_a_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = TerminalOutput()
    for batch in ("3 s", "4 s"):
        output.notify(Notice(f"rank 1 runs {batch}", f"rank 1 runs {batch} (7 s)"))
    output.close()
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_in_a_terminal_a_notice_is_updated_in_place_and_goes_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    output = TerminalOutput()
    for seconds in (1, 2, 2):
        output.notify(Notice("job 7 pending", f"job 7 pending ({seconds} s)"))
    output.close()
    lines = [f"\r\x1b[Kdistsession: job 7 pending ({seconds} s)" for seconds in (1, 2)]
    assert capsys.readouterr().err == "".join([*lines, "\r\x1b[K"])


def test_a_terminals_last_line_has_the_unfinished_lines_of_all_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(terminal, "LIVE_INTERVAL_S", -1.0)
    monkeypatch.setenv("COLUMNS", "41")
    output = TerminalOutput()
    output.write(out(0, "\r10%"))
    output.write(out(1, "\r" + "#" * 100))
    line = capsys.readouterr().out.rpartition("\x1b[K")[2]
    assert line == f"[0] 10% [1] {'#' * 15} "
    output.write(out(0, "\r100%\n"))
    output.close()
    written = capsys.readouterr().out
    assert "\r\x1b[K[0] 100%\n" in written
    assert written.endswith(f"[1] {'#' * 100}\n")
