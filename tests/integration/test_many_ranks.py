"""Thirty-two ranks: who failed is found among many, also on a busy machine and after long use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from distsession import RunError, Session, errors
from tests.integration.conftest import Recorder
from tests.integration.test_cause_first import check_one_line, fails
from tests.integration.test_first_lines import Broken, check_lines, check_works, fail
from tests.integration.test_old_sessions import OPERATIONS, failure

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def many() -> Iterator[Session]:
    with Session(32, output=Recorder(), threads=1, hang_grace=0.5) as session:
        session.execute("import time\nnumber = 40 + rank")
        yield session


@pytest.fixture
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def test_there_is_one_cause_and_one_line(many: Session) -> None:
    error = fails(
        many,
        "if rank == 17: raise ValueError('boom')\n"
        "time.sleep(0.05 * rank)\n"
        "dist.all_reduce(torch.ones(4))",
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
    assert "for rank 9, which finished its part" in text
    check_works(many)
