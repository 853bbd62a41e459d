"""The panel's view of a log, with files that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsession.engine.log_file import read_piece
from distsession.kernel.log_text import FarLog, LocalLog
from distsession.notebook.panel_log import PAGE_LINES, LogView, log_html
from distsession.protocol.agent_messages import LogPiece


@pytest.fixture
def view(tmp_path: Path) -> LogView:
    for rank in range(3):
        text = "".join(f"rank {rank} line {number}\n" for number in range(1000))
        (tmp_path / f"{rank}-stdout").write_text(text)
        (tmp_path / f"{rank}-stderr").write_text(f"oops {rank}\n")
    return LogView((0, 1, 2), lambda rank, stream: LocalLog(str(tmp_path / f"{rank}-{stream}")))


def text(view: LogView) -> str:
    return str(view._text.value)


def status(view: LogView) -> str:
    return str(view._status.value)


def test_it_opens_at_the_end_of_the_rank_that_is_chosen(view: LogView) -> None:
    assert not view.is_open
    view.open(1)
    assert view.is_open
    assert "rank 1 line 999</pre>" in text(view)
    assert f"line {1000 - PAGE_LINES - 1}\n" not in text(view)
    assert 'aria-label="Log of rank 1, stdout"' in text(view)
    assert ">the end of " in status(view)
    view._stream.value = "stderr"
    assert "oops 1</pre>" in text(view)
    assert "all of it" in status(view)
    view.close()
    view.open()
    assert "oops 1" in text(view)


def test_it_follows_the_end_unless_an_older_page_is_shown(view: LogView, tmp_path: Path) -> None:
    view.open(0)
    path = tmp_path / "0-stdout"
    path.write_text(path.read_text() + "new\n")
    view.refresh()
    assert text(view).endswith("new</pre>")
    view._older.click()
    older = text(view)
    assert "rank 0 line 800</pre>" in older
    path.write_text(path.read_text() + "newer\n")
    view.refresh()
    assert text(view) == older
    view._newer.click()
    view._newer.click()
    assert text(view).endswith("newer</pre>")
    for _ in range(20):
        view._older.click()
    assert "rank 0 line 0\n" in text(view)


def test_a_search_shows_the_last_match_and_goes_to_others(view: LogView, tmp_path: Path) -> None:
    view.open(2)
    view._wanted.value = "LINE 99"
    assert "no 'LINE 99' in" in status(view)
    view._wanted.value = "line 99"
    assert "match 11 of 11" in status(view)
    assert "<mark>line 99</mark>9</pre>" in text(view)
    for _ in range(20):
        view._older.click()
    assert "match 1 of 11" in status(view)
    assert "<mark>line 99</mark>\nrank 2 line 100\n" in text(view)
    path = tmp_path / "2-stdout"
    path.write_text(path.read_text() + "line 99 again\n")
    view.refresh()
    assert "match 1 of 12" in status(view)
    view._rank.value = 1
    assert "match 11 of 11" in status(view)


def test_a_rank_that_was_replaced_has_another_log(tmp_path: Path) -> None:
    paths = {0: tmp_path / "before"}
    paths[0].write_text("before\n")
    view = LogView((0,), lambda rank, stream: LocalLog(str(paths[rank])))
    view.open(0)
    paths[0] = tmp_path / "after"
    paths[0].write_text("after\n")
    view.refresh()
    assert text(view).endswith("after</pre>")


def test_a_log_of_another_host_is_shown_and_its_place_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    answers = True

    def ask(begin: int, count: int) -> LogPiece | None:
        return LogPiece(1, 1, *read_piece(str(path), begin, count)) if answers else None

    view = LogView((0,), lambda rank, stream: FarLog("gpu2:/tmp/log", ask))
    view.open(0)
    assert text(view).endswith("line 99999</pre>")
    assert "the end of 1,088,890 bytes, in gpu2:/tmp/log" in status(view)
    view._wanted.value = "line 7777"
    assert "match 11 of 11" in status(view)
    answers = False
    view.open(0)
    assert "in gpu2:/tmp/log, which cannot be read now" in status(view)
    assert "line 9" not in text(view)


def test_what_is_closed_reads_nothing_and_an_inline_session_says_that_it_has_none() -> None:
    asked = []

    def source(rank: int, stream: str) -> LocalLog:
        asked.append(rank)
        return LocalLog("")

    view = LogView((0,), source)
    view.refresh()
    assert asked == []
    view.open(0)
    assert "an inline session has no log" in status(view)


def test_a_page_is_escaped_has_its_colours_and_the_last_state_of_a_bar() -> None:
    page = log_html("<b>\n\x1b[31mred\x1b[0m\n 1%\r100%\r", "", "x")
    assert "&lt;b&gt;\n" in page
    assert ">red</span>\n100%</pre>" in page
    assert "&lt;<mark>B</mark>&gt;" in log_html("<B>", "b", "x")
