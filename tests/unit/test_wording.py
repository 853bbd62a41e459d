"""Commands in messages, as who reads them would type them."""

from __future__ import annotations

import pytest

from distsession.cluster.deaths import AGENT_REMEDY, node_remedy, replace_text, restart_text
from distsession.notebook.wording import as_magics


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            restart_text([7]),
            "%session restart 7 replaces it; --restore NAMES copies variables from a rank that "
            "stays.",
        ),
        (restart_text([0, 1], 2), "%session restart replaces all ranks, without their variables."),
        (
            replace_text([1, 3], 4),
            "%session restart 1,3 replaces them alone; the others keep their variables.",
        ),
        (
            node_remedy([2, 3], 4, alone=True),
            "%session restart 2,3 starts another agent and replaces them; --restore NAMES copies "
            "variables from a rank that stays.",
        ),
        (
            AGENT_REMEDY,
            "%session restart brings them back, without their variables.",
        ),
        (
            "session.restart() without restore= replaces all of them.",
            "%session restart without --restore replaces all of them.",
        ),
        ("see session.diagnose(stacks=True)", "see %session diagnose --stacks"),
        ("first session.restart([0, 2]).", "first %session restart 0,2."),
        ("restore=[...] of my own", "restore=[...] of my own"),
        ("mysession.restart()", "mysession.restart()"),
        ("session.restart(hosts=['a'])", "session.restart(hosts=['a'])"),
    ],
)
def test_calls_are_worded_as_magics(text: str, shown: str) -> None:
    assert as_magics(text) == shown
