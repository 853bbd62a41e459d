"""What a rank has put out and nobody has acknowledged can be told again, as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distsession.engine import retained_output as module
from distsession.engine.log_file import LogFile
from distsession.engine.retained_output import RetainedOutput
from distsession.protocol.messages import CommMessage, Display, InputRequest, OutputEnd, Text


class Rank:
    """Log files, and what is kept of what was written to them."""

    def __init__(self, folder: Path):
        self.paths = [folder / "out", folder / "err"]
        for path in self.paths:
            path.touch()
        self.files = [LogFile(str(path), 1 << 30) for path in self.paths]
        self.retained = RetainedOutput(3, self.files, ("stdout", "stderr"))

    def write(self, request: int, text: str | bytes, stream: int = 0) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        begin = self.files[stream].size
        with self.paths[stream].open("ab") as file:
            file.write(data)
        self.retained.add_text(request, stream, begin, begin + len(data))

    def told(self) -> list[Any]:
        return list(self.retained.messages(lambda message: True))

    def text(self, stream: str = "stdout") -> str:
        return "".join(m.text for m in self.told() if isinstance(m, Text) and m.stream == stream)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    for file in made.files:
        os.close(file._descriptor)


def display(request: int, text: str, *, update: bool = False) -> Display:
    return Display(3, request, {"text/plain": text}, {}, "bar", update)


def state(request: int, **values: Any) -> CommMessage:
    data = {"method": "update", "state": values, "buffer_paths": []}
    return CommMessage(3, request, 0, "comm_msg", "bar", {"data": data}, {})


def test_text_comes_again_from_the_log_with_its_places(rank: Rank) -> None:
    rank.write(1, "of the first\n")
    rank.write(2, "one\n")
    rank.write(2, "two\n")
    rank.write(2, "trouble\n", stream=1)
    rank.retained.forget(1, background=True)
    assert [(m.request, m.stream, m.text, m.begin, m.end) for m in rank.told()] == [
        (2, "stdout", "one\ntwo\n", 13, 21),
        (2, "stderr", "trouble\n", 0, 8),
    ]


def test_nothing_is_kept_of_what_was_acknowledged(rank: Rank) -> None:
    for request in (1, 2):
        rank.write(request, "text")
        rank.retained.add(display(request, "shown"))
        rank.retained.add(OutputEnd(3, request))
    rank.retained.forget(2, background=True)
    assert rank.told() == []


def test_what_comes_between_requests_stays_while_nobody_is_there(rank: Rank) -> None:
    rank.write(5, "of a run")
    rank.write(0, "of a thread")
    rank.retained.forget(5, background=False)
    assert rank.text() == "of a thread"
    rank.retained.forget(5, background=True)
    assert rank.told() == []


def test_text_is_told_in_pieces_that_cut_no_character(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 5)
    text = "größer, 日本語, 🙂🙂\n"
    rank.write(1, text)
    assert rank.text() == text
    ends = [(m.begin, m.end) for m in rank.told()]
    assert ends[0][0] == 0
    assert ends[-1][1] == len(text.encode())
    assert all(before[1] == after[0] for before, after in pairwise(ends))


def test_bytes_that_are_no_text_are_told_too(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4)
    rank.write(1, b"\xff" * 10 + b"\xc3")
    assert rank.text() == "\ufffd" * 11


def test_of_displays_that_are_updated_the_first_and_the_last_are_kept(rank: Rank) -> None:
    rank.retained.add(display(1, "0 %"))
    rank.write(1, "text")
    for percent in range(1, 100):
        rank.retained.add(display(1, f"{percent} %", update=True))
    shown = [m.data["text/plain"] for m in rank.told() if isinstance(m, Display)]
    assert shown == ["0 %", "99 %"]


def test_of_a_widget_all_of_its_state_is_kept_in_one_message(rank: Rank) -> None:
    rank.retained.add(CommMessage(3, 1, 0, "comm_open", "bar", {"data": {"state": {}}}, {}))
    rank.retained.add(state(1, value=1, color="red"))
    rank.retained.add(state(1, value=2))
    opened, last = rank.told()
    assert opened.kind == "comm_open"
    assert last.content["data"]["state"] == {"value": 2, "color": "red"}


def test_a_question_that_was_answered_is_not_asked_again(rank: Rank) -> None:
    rank.retained.add(InputRequest(3, 1, 1, "name? "))
    rank.retained.add(InputRequest(3, 1, 2, "age? "))

    def is_open(message: Any) -> bool:
        return bool(message.number == 2)

    assert [m.prompt for m in rank.retained.messages(is_open)] == ["age? "]


def test_displays_take_no_more_than_their_bound_and_it_is_said(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 100)
    for number in range(4):
        message = display(1, f"{number}" * 40)
        rank.retained.add(Display(3, 1, message.data, {}))
    told = rank.told()
    assert [isinstance(m, Display) for m in told] == [False, False, True, True]
    assert "was not kept" in told[0].text


def test_many_pieces_of_two_streams_are_joined(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ITEMS", 10)
    for number in range(100):
        rank.write(1, f"{number}\n", stream=number % 2)
    assert rank.text("stdout").split() == [str(number) for number in range(0, 100, 2)]
    assert rank.text("stderr").split() == [str(number) for number in range(1, 100, 2)]
    assert len(rank.told()) <= 10


def test_text_that_was_given_back_to_the_disk_is_said_to_be(rank: Rank) -> None:
    rank.write(1, "a" * 1000)
    rank.files[0]._begin = 400
    first, rest = rank.told()
    assert "400 bytes of text were given back" in first.text
    assert (rest.text, rest.begin) == ("a" * 600, 400)
