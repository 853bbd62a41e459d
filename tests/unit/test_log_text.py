"""Pages of a rank's log, and what is looked for in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distsession.engine.log_file import PIECE_BYTES, read_piece
from distsession.kernel import log_text
from distsession.kernel.log_text import FarLog, LogReader
from distsession.protocol.agent_messages import LogPiece


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    return path


def lines(page: log_text.LogPage) -> list[str]:
    return page.text.split("\n")


def test_pages_follow_each_other_to_the_beginning_and_back(log: Path) -> None:
    reader = LogReader(str(log))
    page = reader.before(reader.size, 300)
    assert lines(page) == [f"line {number}" for number in range(700, 1000)]
    seen = [page]
    while page.begin:
        page = reader.before(page.begin, 300)
        seen.insert(0, page)
    assert [line for each in seen for line in lines(each)] == log.read_text().splitlines()
    assert reader.after(0, 2).text == "line 0\nline 1"
    assert reader.after(reader.after(0, 2).end, 1).text == "line 2"


def test_a_page_is_short_however_long_its_lines_are(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_text, "PAGE_BYTES", 100)
    log.write_text("x" * 1000 + "\nlast\n")
    reader = LogReader(str(log))
    assert reader.before(reader.size, 300).text == "last"
    assert len(reader.after(0, 300).text) == 100
    assert len(reader.before(500, 300).text) == 100


def test_a_match_is_shown_with_its_neighbours(log: Path) -> None:
    reader = LogReader(str(log))
    reader.search("line 500")
    (at,) = reader.matches
    assert lines(reader.around(at, 2)) == [f"line {number}" for number in range(498, 503)]
    reader.search("line 0")
    assert lines(reader.around(reader.matches[0], 2)) == ["line 0", "line 1", "line 2"]
    reader.search("999")
    assert lines(reader.around(reader.matches[0], 2)) == ["line 997", "line 998", "line 999"]


def test_what_is_written_later_is_found_too_and_only_that_is_read(log: Path) -> None:
    reader = LogReader(str(log))
    reader.search("loss")
    assert reader.matches == []
    with log.open("a") as file:
        file.write("Loss 1\nlo")
        file.flush()
        reader.search("loss")
        assert len(reader.matches) == 1
        file.write("ss 2\n")
    reader.search("loss")
    assert len(reader.matches) == 2
    reader.search("Loss")
    assert len(reader.matches) == 1
    reader.search("")
    assert reader.matches == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text("ab\n", max_size=40), wanted=st.text("ab", min_size=1, max_size=3))
def test_no_match_is_lost_between_two_pieces(log: Path, text: str, wanted: str) -> None:
    log.write_text(text)
    whole = LogReader(str(log))
    whole.search(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_text, "CHUNK_BYTES", 3)
        reader = LogReader(str(log))
        reader.search(wanted)
    assert reader.matches == whole.matches == [m.start() for m in re.finditer(wanted, text)]


def test_of_very_many_matches_the_last_are_kept(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_text, "MAX_MATCHES", 10)
    reader = LogReader(str(log))
    reader.search("line")
    assert len(reader.matches) == 10
    assert reader.around(reader.matches[-1], 1).text == "line 998\nline 999"


def test_a_log_that_is_gone_is_empty(tmp_path: Path) -> None:
    reader = LogReader(str(tmp_path / "none"))
    reader.search("x")
    assert (reader.size, reader.matches, reader.before(0, 10).text) == (0, [], "")


# --- of another host ------------------------------------------------------------------------------


def far(path: Path) -> FarLog:
    def ask(begin: int, count: int) -> LogPiece:
        return LogPiece(1, 1, *read_piece(str(path), begin, count))

    return FarLog(f"gpu2:{path}", ask)


def test_a_log_of_another_host_is_read_in_pieces_and_without_its_holes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    data = os.urandom(3 * PIECE_BYTES)
    with open(path, "wb") as file:
        file.seek(5 * PIECE_BYTES)  # what was given back
        file.write(data)
    end = path.stat().st_size
    assert far(path).size == end
    pieces = list(far(path).read(0, end))
    assert b"".join(piece for _, piece in pieces) == data
    assert pieces[0][0] == 5 * PIECE_BYTES
    assert max(len(piece) for _, piece in pieces) == PIECE_BYTES
    [(at, some)] = far(path).read(6 * PIECE_BYTES, 6 * PIECE_BYTES + 10)
    assert (at, some) == (6 * PIECE_BYTES, data[PIECE_BYTES : PIECE_BYTES + 10])
    assert list(far(path).read(0, 100)) == []


def test_only_the_end_of_a_long_log_of_another_host_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_text, "FAR_SEARCH_BYTES", 1000)
    path = tmp_path / "log"
    path.write_text("here\n" + "x" * 5000 + "\nhere\n")
    reader = LogReader(far(path))
    reader.search("here")
    assert reader.matches == [5006]
    whole = LogReader(str(path))
    whole.search("here")
    assert whole.matches == [0, 5006]


def test_a_log_that_is_gone_or_does_not_answer_is_empty(tmp_path: Path) -> None:
    reader = LogReader(far(tmp_path / "none"))
    assert (reader.size, reader.before(100, 10).text) == (0, "")
    silent = FarLog("gpu2:log", lambda begin, count: None)
    assert (silent.size, list(silent.read(0, 10))) == (0, [])
    assert silent.note == "in gpu2:log, which cannot be read now"
