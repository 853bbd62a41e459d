"""Thirty-two ranks: who failed is found among many, also on a busy machine and after long use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from distsession import RunError, RunInterrupt, Session, errors
from distsession.protocol.messages import Text
from tests.backends import Backend, only
from tests.integration.conftest import Recorder
from tests.integration.test_cause_first import check_one_line, fails
from tests.integration.test_first_lines import Broken, check_lines, check_works, fail
from tests.integration.test_old_sessions import OPERATIONS, failure
from tests.integration.test_restart import press_stop
from tests.until import Press, press_at

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def many(backend: Backend) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        if backend.is_device:
            patch.setenv("DISTSESSION_STANDIN_DEVICES", "32")
        with backend.session(32, output=Recorder(), threads=1, hang_grace=0.5) as session:
            session.execute("import time\nnumber = 40 + rank")
            yield session


@pytest.fixture
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def test_there_is_one_cause_and_one_line(many: Session, backend: Backend) -> None:
    error = fails(
        many,
        "if rank == 17: raise ValueError('boom')\n"
        "time.sleep(0.05 * rank)\n" + backend.program("dist.all_reduce(torch.ones(4)); FINISH"),
    )
    check_one_line(error, 17, "ValueError", set(range(32)) - {17})
    assert len(error._render_traceback_()) < 15


def test_the_odd_one_is_first(many: Session) -> None:
    shown = fail(many, "dist.all_reduce(torch.ones(4 + (rank == 17)))")
    check_lines(
        shown, Broken("", "rank 17", also=("float32 [5], ranks 0-16,18-31 with float32 [4], at",))
    )
    shown = fail(many, "if rank != 17: dist.barrier()")
    check_lines(shown, Broken("", "rank 17", what="barrier"))
    check_works(many)


def test_stop_names_the_one_that_all_wait_for(many: Session, backend: Backend) -> None:
    check_works(many)  # before the first operation of a communicator ranks meet
    code = "if rank == 17: time.sleep(60)\ndist.all_reduce(torch.ones(4)); FINISH"
    with Press(many, many.interrupt), pytest.raises(RunInterrupt) as caught:
        many.execute(backend.program(code), label="In[7]")
    text = str(caught.value)
    assert f"ranks 0-16,18-31 {backend.waits(31)} all_reduce #" in text
    assert "for rank 17, which runs In[7] line 1" in text
    assert list(many.evaluate("number").values()) == list(range(40, 72))
    check_works(many)


def test_one_that_dies_in_a_collective_is_replaced_alone(many: Session, backend: Backend) -> None:
    pids = [info.pid for info in many.infos]
    code = "import os\nif rank == 17: os._exit(3)\ndist.all_reduce(torch.ones(4)); FINISH"
    text = failure(many, backend.program(code), RunError)
    assert text.startswith(f"EngineDiedError: rank 17 (pid {pids[17]}) ended with exit code 3")
    many.restart([17], restore=["number", "time"])
    again = [info.pid for info in many.infos]
    assert [rank for rank in many.ranks if pids[rank] != again[rank]] == [17]
    assert many[17].evaluate("number")[17] == 40
    many[17].execute("number = 40 + rank")
    check_works(many)


@only("gloo", "others do not connect as they start")
def test_a_restart_that_is_stopped_shows_nothing_of_ranks_that_miss_each_other(
    many: Session,
) -> None:
    shown = many.output()
    assert isinstance(shown, Recorder)
    shown.clear()
    for moment in range(8):
        press_at([0.05 * (1 + moment)], press_stop, many.restart)
    many.restart()
    texts = [message.text for message in shown.messages if isinstance(message, Text)]
    assert [text for text in texts if "gloo" in text.lower()] == []
    many.execute("import time\nnumber = 40 + rank")
    check_works(many)


@only("gloo", "it takes half a minute, and old sessions are tried on each elsewhere")
@pytest.mark.usefixtures("busy_loops")
def test_they_are_freed_beside_busy_loops_after_long_use(many: Session) -> None:
    many.execute(OPERATIONS.format(count=400, first=1, shapes=400))
    many.execute("number = 40 + rank")
    many.execute("odd = dist.new_group(list(range(1, 32, 2)))")
    for number in range(100):  # more than the board has slots for
        many.execute(f"dist.all_reduce(torch.ones({number + 1}, 3))")
    text = failure(many, "if rank == 7: raise ValueError('late')\ndist.barrier()", RunError)
    assert text.startswith("ValueError on rank 7 at In[7] line 1: late")
    assert "waited in barrier #" in text  # a late one may have come to it later
    code = "if rank % 2 and rank != 9:\n    dist.barrier(group=odd)"
    text = failure(many, code, errors.CollectiveHangError)
    assert "rank 9 did not come to barrier #" in text
    check_works(many)
