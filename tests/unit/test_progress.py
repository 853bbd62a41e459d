"""Long work says what it waits for, short work does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from distsession.kernel import progress
from distsession.kernel.output import Notice
from distsession.kernel.progress import ProgressNotice, TransferProgress
from distsession.view import Silent


class Notices(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_file = False
        self.is_closed = False

    def notify(self, notice: Notice) -> None:
        self.texts.append(notice.text)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Notices:
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.05)
    monkeypatch.setattr(progress, "SHOW_AFTER_IN_A_FILE_S", 60.0)
    monkeypatch.setattr(progress, "SHOW_EVERY_S", 0.05)
    return Notices()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_says_what_is_waited_for_until_it_is_over(output: Notices) -> None:
    reasons = iter(["torch to be imported"])
    with ProgressNotice(output, "starting", lambda: next(reasons, "rank 1")):
        wait_for(lambda: len(output.texts) > 2)
    assert output.texts[:2] == [
        "starting, waiting for torch to be imported (0 s)",
        "starting, waiting for rank 1 (0 s)",
    ]
    told = len(output.texts)
    time.sleep(0.15)
    assert len(output.texts) == told
    assert output.is_closed


def test_what_is_soon_over_is_not_told(output: Notices) -> None:
    with ProgressNotice(output, "starting", str):
        pass
    assert output.texts == []
    assert output.is_closed


def test_where_nobody_looks_on_it_is_told_later(output: Notices) -> None:
    output.is_file = True
    with ProgressNotice(output, "starting", str):
        time.sleep(0.2)
    assert output.texts == []


def test_a_reason_that_cannot_be_had_and_an_error_inside_do_no_harm(output: Notices) -> None:
    with pytest.raises(KeyError), ProgressNotice(output, "starting", lambda: str(1 / 0)):  # noqa: PT012
        wait_for(lambda: bool(output.texts))
        raise KeyError
    assert output.texts[0] == "starting (0 s)"
    assert output.is_closed


def test_it_ends_where_its_block_was_never_left(output: Notices) -> None:
    notice = ProgressNotice(output, "connecting", lambda: "")
    notice.__enter__()  # as where a Ctrl-C comes before the block begins
    wait_for(lambda: bool(output.texts))
    del notice
    wait_for(lambda: output.is_closed)


def test_what_two_threads_have_sent_is_shown_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "SHOW_TRANSFER_EVERY_S", 0.0)
    begun, later, shown = threading.Event(), threading.Event(), []

    def show(notice: Notice) -> None:
        if not begun.is_set():
            begun.set()
            later.wait(0.5)  # the other thread comes meanwhile
        shown.append(notice.text)

    transfer = TransferProgress(show, "sending")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(transfer, 10**6, 2 * 10**6)
        begun.wait(60)
        transfer(2 * 10**6, 2 * 10**6)
        later.set()
        first.result()
    assert ["1 of 2 MB" in shown[0], "2 of 2 MB" in shown[1]] == [True, True]
