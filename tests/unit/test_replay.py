"""What the ranks put out is noted, and put out again."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from distsession.cluster.pending import OutputMessage
from distsession.display.render import Bundle
from distsession.errors import OptionsError, SessionStateError
from distsession.kernel import replay as module
from distsession.kernel.log_text import MissingText, read_log
from distsession.kernel.output import Output
from distsession.kernel.replay import OutputHistory, RunRecord, replay, replayed_text
from distsession.protocol.cells import parse_cell
from distsession.protocol.messages import ClearOutput, Display, Text


class Kept(Output):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.shown: dict[int, Bundle] = {}

    def write(self, message: OutputMessage) -> None:
        self.messages.append(message)

    def show(self, shown: dict[int, Bundle]) -> None:
        self.shown = shown


class Rank:
    """A rank's two log files, and what it sends."""

    def __init__(self, folder: Path, record: RunRecord, rank: int = 0):
        self._paths = {name: folder / name for name in ("stdout", "stderr")}
        self._record = record
        self._rank = rank
        for path in self._paths.values():
            path.touch()

    def path(self, rank: int, stream: str) -> Path:
        return self._paths[stream]

    def write(self, stream: str, data: bytes) -> None:
        path = self._paths[stream]
        begin = path.stat().st_size
        with path.open("ab") as file:
            file.write(data)
        text = data.decode(errors="replace")
        self._record.add(Text(self._rank, 1, stream, text, begin, begin + len(data)))


def image(data: str, display_id: str = "", update: bool = False) -> Display:
    return Display(0, 1, {"image/png": data, "text/plain": "<Figure>"}, {}, display_id, update)


@pytest.fixture
def history() -> OutputHistory:
    return OutputHistory()


@pytest.fixture
def record(history: OutputHistory, tmp_path: Path) -> RunRecord:
    made = history.begin(3, (0, 1), lambda rank, stream: tmp_path / stream)
    assert made is not None
    return made


@pytest.fixture
def rank(record: RunRecord, tmp_path: Path) -> Rank:
    return Rank(tmp_path, record)


def again(record: RunRecord) -> tuple[Kept, list[str]]:
    output = Kept()
    return output, replay(record, output, record.ranks)


def test_text_comes_again_in_order_from_the_files(record: RunRecord, rank: Rank) -> None:
    for stream, data in (
        ("stdout", b"a\n"),
        ("stdout", "ü"[:1].encode()),
        ("stderr", b"oops\n"),
        ("stdout", b"b\n"),
    ):
        rank.write(stream, data)
    record.add(image("AAAA"))
    rank.write("stdout", b"c\n")
    output, missing = again(record)
    assert [getattr(m, "text", "image") for m in output.messages] == [
        "a\nü",
        "oops\n",
        "b\n",
        "image",
        "c\n",
    ]
    assert missing == []


def test_pieces_that_follow_each_other_are_one(record: RunRecord, rank: Rank) -> None:
    for _ in range(1000):
        rank.write("stdout", b"line\n")
    assert len(record.pieces[0]) == 1


def test_no_number_of_pieces_grows_without_bound_and_no_text_is_lost(
    record: RunRecord, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PIECES", 10)
    for number in range(100):
        rank.write("stdout", b"%d\n" % number)
        rank.write("stderr", b"e%d\n" % number)
    assert len(record.pieces[0]) == 10
    output, _ = again(record)
    for stream, name in (("stdout", ""), ("stderr", "e")):
        text = "".join(m.text for m in output.messages if m.stream == stream)
        assert text.split() == [f"{name}{number}" for number in range(100)]


def test_what_was_cleared_and_updated_is_so_again(record: RunRecord) -> None:
    record.add(image("AAAA", "x"))
    record.add(image("BBBB", "y"))
    record.add(image("CCCC", "x", update=True))
    record.add(ClearOutput(1, 1, False))
    output, _ = again(record)
    assert [m.data["image/png"] for m in output.messages[:2]] == ["CCCC", "BBBB"]
    assert not any(m.update for m in output.messages[:2])
    assert isinstance(output.messages[2], ClearOutput)


def test_displays_are_kept_within_bounds_and_what_is_missing_is_said(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 1000)
    for name in "ABC":
        record.add(image(name * 400))
    record.show({1: ({"text/plain": "1"}, {})})
    output, missing = again(record)
    assert [m.data["image/png"][0] for m in output.messages] == ["B", "C"]
    assert missing == ["a display (image/png) of rank 0"]
    assert output.shown == {1: ({"text/plain": "1"}, {})}
    assert "Not kept: a display (image/png) of rank 0." in replayed_text([record], missing)


def test_text_that_found_no_room_on_the_disk_is_kept(record: RunRecord) -> None:
    record.add(Text(0, 1, "stdout", "full\n"))
    assert again(record)[0].messages[0].text == "full\n"


def test_how_a_cell_failed_is_told_again(record: RunRecord) -> None:
    record.fail(SessionStateError("no"))
    assert replayed_text([record], []).endswith("It failed with\n\nSessionStateError: no")


def test_runs_without_output_are_not_kept_and_those_of_no_cell_have_no_record(
    history: OutputHistory, record: RunRecord
) -> None:
    assert history.begin(None, (0,), lambda rank, stream: None) is None
    with pytest.raises(SessionStateError, match="no cell has put out anything"):
        history.runs()
    record.add(image("A"))
    assert history.runs() == history.runs(3) == [record]
    with pytest.raises(SessionStateError, match=r"in In\[7\]: the cells that have some are In 3\."):
        history.runs(7)


def test_a_log_that_is_gone_is_said(record: RunRecord, rank: Rank) -> None:
    rank.write("stdout", b"a\n")
    rank.path(0, "stdout").unlink()
    assert again(record)[1] == ["text whose log file is gone of rank 0"]


def test_what_was_given_back_to_the_disk_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (1 << 17) + b"the end\n")
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with path.open("r+b") as file:
        if fallocate(file.fileno(), 3, 0, 1 << 16):
            pytest.skip("this file system cannot give parts of a file back")
    pieces: list[bytes] = []
    reading = read_log(str(path), 0, path.stat().st_size)
    with pytest.raises(MissingText, match="65,536 bytes"):
        pieces.extend(data for _, data in reading)
    assert b"".join(pieces) == b"x" * (1 << 16) + b"the end\n"


def test_a_file_that_is_shorter_than_noted_is_no_endless_loop(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abc")
    with pytest.raises(MissingText, match="7 bytes"):
        list(read_log(str(path), 0, 10))


@pytest.mark.parametrize("text", ["3", "In 3", "In[3]", "in [3]", "[3]", "In [3]:"])
def test_a_cell_is_named_as_its_prompt_says(text: str) -> None:
    assert parse_cell(text) == 3


def test_what_names_no_cell_is_an_error() -> None:
    assert parse_cell(" ") is None
    with pytest.raises(OptionsError, match=r"'Out\[3\]' names no cell"):
        parse_cell("Out[3]")


# --- text whose log is on another host ------------------------------------------------------------


@pytest.fixture
def far(history: OutputHistory) -> RunRecord:
    made = history.begin(3, (0, 1), lambda rank, stream: None)
    assert made is not None
    return made


def text(at: int, words: str, stream: str = "stdout", rank: int = 0) -> Text:
    return Text(rank, 1, stream, words, at, at + len(words))


def test_text_of_another_host_is_kept_and_comes_again_in_order(far: RunRecord) -> None:
    far.add(text(0, "a\n"))
    far.add(text(2, "b\n"))
    far.add(text(0, "oops\n", "stderr"))
    far.add(text(4, "c\n"))
    far.add(text(0, "other\n", rank=1))
    output, missing = again(far)
    assert [(m.rank, m.stream, m.text) for m in output.messages] == [
        (0, "stdout", "a\nb\n"),
        (0, "stderr", "oops\n"),
        (0, "stdout", "c\n"),
        (1, "stdout", "other\n"),
    ]
    assert missing == []


def test_text_of_another_host_is_merged_within_bounds(far: RunRecord) -> None:
    for number in range(10_000):
        far.add(text(5 * number, "line\n"))
    assert 2 < len(far.pieces[0]) < 10
    output, _ = again(far)
    assert "".join(m.text for m in output.messages) == "line\n" * 10_000
    far.add(text(90_000, "behind a gap\n"))
    assert output.messages[-1].text[-13:] != again(far)[0].messages[-1].text[-13:]


def test_of_much_text_of_another_host_the_oldest_is_let_go_and_named(
    history: OutputHistory, far: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 100_000)
    for number in range(1000):
        far.add(text(1000 * number, "x" * 999 + "\n"))
    output, missing = again(far)
    assert missing == ["text whose log is on another host of rank 0"]
    assert 50_000 < sum(len(m.text) for m in output.messages) <= 100_000
    assert history._bytes <= 100_000
    far.add(text(1_000_000, "the last\n"))
    assert again(far)[0].messages[-1].text.endswith("the last\n")


def test_many_short_pieces_of_text_count_by_what_they_take(
    history: OutputHistory, far: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 100_000)
    for number in range(1000):
        far.add(text(number, "x", ("stdout", "stderr")[number % 2]))
    kept = [piece for piece in far.pieces[0] if piece.content is not None]  # type: ignore[union-attr]
    assert len(kept) < 300


def test_text_goes_on_behind_what_was_let_go(
    history: OutputHistory, far: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 1000)
    far.add(text(0, "first\n"))
    far.add(Text(1, 1, "stdout", "y" * 2000, 0, 2000))
    assert far.pieces[0][0].content is None  # type: ignore[union-attr]
    far.add(text(6, "second\n"))
    assert [m.text for m in again(far)[0].messages if m.rank == 0] == ["second\n"]


def test_an_error_is_told_again_without_what_colours_it(record: RunRecord) -> None:
    record.fail(SessionStateError("\x1b[31mno\x1b[39m, \x1b[1mnever\x1b[0m"))
    assert replayed_text([record], []).endswith("SessionStateError: no, never")
