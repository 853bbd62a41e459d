"""When the look has to be at which a cause that was seen is acted upon."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distsession.cluster.pending import PendingRequest
from distsession.kernel.recovery import Recovery
from distsession.kernel.watchdog import CONFIRM_FAILURE_S, CONFIRM_S, Watchdog
from distsession.protocol.diagnosis import Kind, Verdict

GRACE_S = 7.0


@pytest.mark.parametrize(
    ("verdict", "shares_board", "seconds"),
    [
        (Verdict(Kind.DEADLOCK, ""), True, GRACE_S),
        (Verdict(Kind.DEADLOCK, "", failed=True), True, CONFIRM_FAILURE_S),
        (Verdict(Kind.DEADLOCK, "", failed=True), False, CONFIRM_S),
        (Verdict(Kind.ORDER, ""), True, CONFIRM_S),
        (Verdict(Kind.WAIT, ""), True, None),
    ],
    ids=["a deadlock", "a failure", "a failure on several hosts", "other orders", "a wait"],
)
def test_the_next_look_is_when_what_was_seen_has_been_so_for_long_enough(
    verdict: Verdict, shares_board: bool, seconds: float | None
) -> None:
    launcher = SimpleNamespace(is_broken=False, shares_board=shares_board)
    recovery: Any = SimpleNamespace(launcher=launcher, verdict=None, hang_grace=GRACE_S)
    pending = PendingRequest(1, (0, 1))
    watchdog = Watchdog(cast(Recovery, recovery), pending, lambda notice: None)
    now = time.monotonic()
    watchdog._act_on(verdict, {}, now, None)
    assert watchdog.due == (None if seconds is None else now + seconds)
