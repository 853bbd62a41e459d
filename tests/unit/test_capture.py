"""What a rank puts out: in order, without loss, and for the right request."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distsession.engine import capture as module
from distsession.engine.capture import Capture, redirected
from distsession.engine.control import Interrupter
from distsession.protocol.messages import Display, OutputEnd, Text, TimelineRequest


class Rank:
    """A rank's capture. Within ``with``, descriptors 1 and 2 are its log files, as on a rank."""

    def __init__(self, capture: Capture, sent: list[Any], files: list[int]) -> None:
        self.capture = capture
        self.sent = sent
        self._files = files
        self._saved: list[int] = []

    def __enter__(self) -> None:
        self._saved = [os.dup(1), os.dup(2)]
        for number, file in enumerate(self._files, 1):
            os.dup2(file, number)

    def __exit__(self, *_: object) -> None:
        for number, descriptor in enumerate(self._saved, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)

    def drained(self) -> list[Any]:
        self.capture.flush()
        found, self.sent[:] = list(self.sent), []
        return found

    def text(self, messages: list[Any], stream: str = "stdout") -> str:
        return "".join(m.text for m in messages if isinstance(m, Text) and m.stream == stream)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    yield from make_rank(tmp_path)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Rank]:
    """One whose session is kept: what it puts out is not acknowledged yet."""
    yield from make_rank(tmp_path, acknowledged=lambda: 0)


def make_rank(folder: Path, **options: Any) -> Iterator[Rank]:
    paths = [str(folder / name) for name in ("out", "err")]
    files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in paths]
    sent: list[Any] = []
    capture = Capture(3, (paths[0], paths[1]), 1 << 30, sent.append, **options)
    yield Rank(capture, sent, files)
    for descriptor in (*files, *(log._descriptor for log in capture._files)):
        os.close(descriptor)


def test_python_and_a_descriptor_come_in_order(rank: Rank) -> None:
    with rank:
        out, _ = rank.capture.streams
        print("from python", file=out)
        os.write(1, b"from C\n")
        print("again", file=out)
        assert rank.text(rank.drained()) == "from python\nfrom C\nagain\n"
        assert rank.drained() == []


def test_the_two_streams_keep_their_order(rank: Rank) -> None:
    with rank:
        out, err = rank.capture.streams
        for number in range(3):
            print("out", number, file=out)
            print("err", number, file=err)
        told = [(m.stream, m.text) for m in rank.drained()]
        streams = ["stdout", "stderr"] * 3
        assert told == [(s, f"{s[3:]} {n // 2}\n") for n, s in enumerate(streams)]


@pytest.mark.parametrize("python", [0, 1])
@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("earlier", [0, 1])
def test_what_a_process_has_written_stands_before_what_comes_next(
    rank: Rank, python: int, other: int, earlier: int
) -> None:
    with rank:
        print("before", file=rank.capture.streams[earlier])
        subprocess.run(["sh", "-c", f"echo process >&{other + 1}"], check=True)
        print("next", file=rank.capture.streams[python])
        subprocess.run(["sh", "-c", f"echo last >&{2 - other}"], check=True)
        told = "".join(message.text for message in rank.drained())
        assert told.split() == ["before", "process", "next", "last"]


def test_a_display_comes_after_what_was_written_before_it(rank: Rank) -> None:
    with rank:
        out, _ = rank.capture.streams
        shown = Display(3, 1, {"text/plain": "a picture"}, {})
        print("before", file=out)
        rank.capture.show(shown)
        print("after", file=out)
        before, display, after = rank.drained()
        assert (before.text, display, after.text) == ("before\n", shown, "after\n")


def test_text_belongs_to_the_request_in_which_it_was_written(rank: Rank) -> None:
    with rank:
        out, _ = rank.capture.streams
        for request in (7, 8):
            rank.capture.begin_request(TimelineRequest(request, 0))
            print("in", request, file=out)
            rank.capture.end_request(TimelineRequest(request, 0))
            assert rank.capture.has_output
        print("in none", file=out)
        told = [(m.request, getattr(m, "text", OutputEnd)) for m in rank.drained()]
        ends = [(7, OutputEnd), (8, OutputEnd)]
        assert told == [(7, "in 7\n"), ends[0], (8, "in 8\n"), ends[1], (0, "in none\n")]


def test_a_request_without_output_has_no_end_of_output(rank: Rank) -> None:
    with rank:
        rank.capture.begin_request(TimelineRequest(7, 0))
        rank.capture.end_request(TimelineRequest(7, 0))
        assert not rank.capture.has_output
        assert rank.drained() == []


def test_a_character_that_is_cut_in_two_is_put_together(rank: Rank) -> None:
    with rank:
        first, second = "é".encode()[:1], "é".encode()[1:]
        os.write(1, first)
        assert rank.drained() == []
        os.write(1, second)
        assert rank.text(rank.drained()) == "é"


def test_bytes_that_are_no_text_are_shown_all_the_same(rank: Rank) -> None:
    with rank:
        os.write(1, b"a\xffb")
        assert rank.text(rank.drained()) == "a\N{REPLACEMENT CHARACTER}b"


def test_a_long_text_comes_whole_and_in_pieces(rank: Rank) -> None:
    with rank:
        out, _ = rank.capture.streams
        text = "0123456789" * (module.CHUNK_BYTES // 4)
        out.write(text)
        messages = rank.drained()
        assert len(messages) > 1
        assert rank.text(messages) == text


def test_the_streams_are_what_code_expects_of_them(rank: Rank) -> None:
    with rank:
        out, err = rank.capture.streams
        assert [s.fileno() for s in (out, err)] == [1, 2]
        assert not out.isatty()
        assert out.buffer.write(b"bytes") == 5
        assert rank.text(rank.drained()) == "bytes"
        with pytest.raises(TypeError, match="must be str, not bytes"):
            out.write(b"bytes")  # type: ignore[arg-type]
        assert isinstance(out, io.TextIOBase)


def in_a_child(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_fork_writes_into_the_logs_of_its_rank_and_sends_nothing(rank: Rank) -> None:
    with rank:

        def child() -> None:
            rank.capture.become_child()
            rank.capture.streams[0].write("from a child\n")
            rank.capture.show(Display(3, 0, {"text/plain": "shown"}, {}))

        in_a_child(child)
        assert rank.sent == []
        assert rank.text(rank.drained()) == "from a child\nshown\n"


def test_each_text_says_where_it_lies_in_its_file(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)  # so that pieces end within characters
    with rank:
        out, err = rank.capture.streams
        out.write("äöü€\n")
        err.write("ß\n")
        out.write("end\n")
    texts = [message for message in rank.drained() if isinstance(message, Text)]
    for stream, name in (("stdout", "out"), ("stderr", "err")):
        data, at = (tmp_path / name).read_bytes(), 0
        for text in (text for text in texts if text.stream == stream):
            assert text.begin == at
            at = text.end
        assert at == len(data)
        assert rank.text(texts, stream) == data.decode()


def test_another_kernel_is_told_what_none_has_acknowledged(kept: Rank) -> None:
    with kept:
        os.write(1, b"of the first\n")
        assert kept.text(kept.drained()) == "of the first\n"
        kept.capture.detach()
        os.write(1, b"of none\n")
        assert kept.drained() == []
        kept.capture.resume(lambda: None)
        kept.capture._send_retained()
        assert kept.text(kept.sent) == "of the first\nof none\n"


def test_a_kernel_that_went_at_once_is_told_nothing(kept: Rank) -> None:
    allowed: list[str] = []
    with kept:
        os.write(1, b"text\n")
        kept.drained()
        kept.capture.detach()
        kept.capture.resume(lambda: allowed.append("the first"))
        kept.capture.detach()
        kept.capture._send_retained()
        assert (kept.sent, allowed) == ([], [])


def test_one_that_goes_while_it_is_told_gets_nothing_of_what_comes_then(kept: Rank) -> None:
    with kept:
        os.write(1, b"text\n")
        kept.drained()
        kept.capture.detach()
        send = kept.capture._send_now

        def send_and_go(message: Any) -> None:
            send(message)
            kept.capture.detach()

        kept.capture._send_now = send_and_go
        kept.capture.resume(lambda: None)
        kept.capture._send_retained()
        kept.capture._send_now = send
        os.write(1, b"more\n")
        assert kept.text(kept.drained()) == "text\n"
        kept.capture.resume(lambda: None)
        kept.capture._send_retained()
        assert kept.text(kept.sent) == "text\nmore\n"


PRINTS = """
while len(caught) < 100:
    try:
        while len(caught) < 100:
            print(count, *words)
            count += 1
    except KeyboardInterrupt:
        caught.append(count)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [("of", "text\n"), ("x" * (3 << 20),)], ids=["short", "long"])
def test_no_interrupt_parts_a_print(rank: Rank, words: tuple[str, ...]) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupter, caught = Interrupter(), list[int]()
    is_over = threading.Event()

    def press() -> None:
        while not is_over.wait(0.001):
            rank.capture.flush()
            interrupter.target(7)
            interrupter.interrupt(interrupter._running)

    presses = threading.Thread(target=press)
    code = compile(PRINTS, "In[1]", "exec")
    names = {"count": 0, "words": words, "caught": caught}
    try:
        with rank, redirected(*rank.capture.streams):
            presses.start()
            while len(caught) < 100:  # one may come between the cell's own lines
                with contextlib.suppress(KeyboardInterrupt), interrupter.user_code(7):
                    exec(code, names)
    finally:
        is_over.set()
        presses.join()
        signal.signal(signal.SIGINT, before)
    line = re.compile(f"([0-9]+) {re.escape(' '.join(words))}\n")
    text = rank.text(rank.drained())
    assert line.sub("", text) == ""
    numbers = [int(found[1]) for found in line.finditer(text)]
    assert all(after - number in (0, 1) for number, after in pairwise(numbers))
