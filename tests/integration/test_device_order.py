"""Devices that have operations of two groups in different orders, in streams of the groups' own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from distsession import RunInterrupt, Session
from distsession.errors import CollectiveMismatchError
from distsession.kernel import watchdog
from distsession.protocol.diagnosis import Kind, diagnose
from tests.backends import STANDIN
from tests.integration.conftest import Recorder
from tests.until import Press, until

pytestmark = pytest.mark.skipif(STANDIN.why_not() is not None, reason=STANDIN.why_not() or "")

SET_UP = """
other = dist.new_group([0, 1])
x, y = torch.ones(100_000), torch.ones(100_000)
x += 0  # of which the first, on this device, has torch import much
for group in (None, other):
    dist.all_reduce(torch.ones(1), group=group)
torch.accelerator.synchronize()
"""
CROSSED = """
groups = [None, other] if rank == 0 else [other, None]
works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip((x, y), groups)]
for work in works: work.wait()
x.sum().item()
"""
TOLD = "rank 1 the other way round: the devices may be waiting for each other."


@pytest.fixture
def begin(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Session, Recorder]]:
    monkeypatch.setattr(watchdog, "NOTICE_AFTER_S", 0.5)
    monkeypatch.setattr(watchdog, "NOTICE_EVERY_S", 0.3)

    def begin(has_one_stream: str) -> tuple[Session, Recorder]:
        monkeypatch.setenv("DISTSESSION_STANDIN_ONE_STREAM", has_one_stream)
        output = Recorder()
        session = start(2, **STANDIN.options(2), output=output, threads=1, hang_grace=0.5)
        session.execute(SET_UP)
        return session, output

    return begin


def test_where_it_is_a_deadlock_a_notice_says_what_crosses_and_stop_frees_it(
    begin: Callable[[str], tuple[Session, Recorder]],
) -> None:
    session, output = begin("1")  # as on a GPU on which only one of them has room

    def is_told() -> bool:
        return any(TOLD in notice for notice in output.notices)

    with (
        Press(session, session.interrupt, lambda: until(is_told)),
        contextlib.suppress(RunInterrupt),
    ):
        session.execute(CROSSED, label="In[7]")
        raise AssertionError("a deadlock has ended")
    told = next(notice for notice in output.notices if TOLD in notice)
    assert told.count(" at In[7] line 3") >= 2
    assert diagnose(session.recovery.reports(ask=True)).kind is Kind.NOTHING
    session.execute("torch.accelerator.synchronize(); x.fill_(1); dist.all_reduce(x)")
    assert dict(session.evaluate("x[0].item()")) == {0: 2.0, 1: 2.0}


def test_where_both_have_room_it_comes_through(
    begin: Callable[[str], tuple[Session, Recorder]],
) -> None:
    session, _ = begin("")
    session.execute(CROSSED)
    assert dict(session.evaluate("x[0].item()")) == {0: 2.0, 1: 2.0}


def test_in_one_stream_it_is_certain_and_ended(
    begin: Callable[[str], tuple[Session, Recorder]],
) -> None:
    session, _ = begin("")
    in_one_stream = (
        CROSSED.replace(", async_op=True", "")
        .replace("works = ", "")
        .replace("for work in works: work.wait()\n", "")
    )
    with pytest.raises(CollectiveMismatchError, match="in different orders"):
        session.execute(in_one_stream)


def test_what_was_given_to_a_device_behind_what_is_stopped_is_said_and_not_gone_on_with(
    begin: Callable[[str], tuple[Session, Recorder]],
) -> None:
    session, _ = begin("")
    with Press(session, session.interrupt), pytest.raises(RunInterrupt) as caught:
        session.execute(
            "import time\n"
            "if rank == 1: time.sleep(300)\n"
            "dist.all_reduce(x); x += 1\n"
            "y = x.sum().item()"
        )
    assert (
        "What rank 0 had given to the device behind it was computed from values that had not come: "
        "set again what that may have changed."
    ) in " ".join(str(caught.value).split())
    assert session[0].evaluate("type(y).__name__")[0] == "Tensor"  # as it was before


def test_what_is_stopped_in_an_import_does_not_go_on_with_what_no_collective_has_given(
    begin: Callable[[str], tuple[Session, Recorder]], tmp_path: Path
) -> None:
    library = tmp_path / "site-packages"  # an import of which no interrupt cuts off
    library.mkdir()
    (library / "slow_library.py").write_text("import time\ntime.sleep(2)\n")
    session, output = begin("")

    def until_importing() -> None:
        until(lambda: "imports" in output.text(0))

    with Press(session, session.interrupt, until_importing), pytest.raises(RunInterrupt):
        session.execute(
            f"import sys, time\nsys.path.insert(0, {str(library)!r})\n"
            "if rank == 1: time.sleep(300)\n"
            "dist.all_reduce(x)\n"
            "print('imports', flush=True)\n"
            "import slow_library\n"
            "y = x.sum().item()"
        )
    assert session[0].evaluate("type(y).__name__, 'slow_library' in sys.modules")[0] == (
        "Tensor", True,
    )  # fmt: skip
