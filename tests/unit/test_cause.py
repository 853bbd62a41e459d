"""Why operations broke off, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.protocol.cause import late_text, merged, mismatch_remedy, mismatch_text, sentence
from distsession.protocol.messages import Called, Mismatch, Operation, TimedOut
from distsession.ranks import format_ranks

LINE = "In[4] line 3"
SUM = "float32 [4], sum"


def called(*what: tuple[str, str, str], group: str = "world") -> Mismatch:
    """Of each rank the operation, its detail and the place."""
    return Mismatch(group, 5, tuple(Called(rank, *each) for rank, each in enumerate(what)))


def all_reduce(*details: str, places: tuple[str, ...] = ()) -> Mismatch:
    where = places or (LINE,) * len(details)
    return called(*(("all_reduce", d, at) for d, at in zip(details, where, strict=True)))


SENTENCES = {
    "the odd rank first, and only what differs": (
        all_reduce("float32 [2], sum", "float32 [2], sum", SUM, "float32 [2], sum"),
        "rank 2 called all_reduce with float32 [4], ranks 0-1,3 with float32 [2], at In[4] line 3",
    ),
    "another reduction": (
        all_reduce(SUM, SUM, "float32 [4], max"),
        "rank 2 called all_reduce with max, ranks 0-1 with sum, at In[4] line 3",
    ),
    "two things that differ": (
        all_reduce(SUM, SUM, "int32 [4], max"),
        "rank 2 called all_reduce with int32 [4], max, ranks 0-1 with float32 [4], sum, "
        "at In[4] line 3",
    ),
    "a tie in the order of ranks": (
        all_reduce("float32 [2], sum", SUM),
        "rank 0 called all_reduce with float32 [2], rank 1 with float32 [4], at In[4] line 3",
    ),
    "different lines": (
        all_reduce("float32 [2], sum", SUM, SUM, places=("In[4] line 2", LINE, LINE)),
        "rank 0 called all_reduce with float32 [2] at In[4] line 2, ranks 1-2 with float32 [4] "
        "at In[4] line 3",
    ),
    "several lines on one side": (
        all_reduce(SUM, SUM, "float32 [2], sum", places=("In[4] line 2", LINE, LINE)),
        "rank 2 called all_reduce with float32 [2] at In[4] line 3, ranks 0-1 with float32 [4] "
        "at In[4] line 2 and line 3",
    ),
    "different operations": (
        called(("all_reduce", SUM, LINE), ("all_reduce", SUM, LINE), ("barrier", "", LINE)),
        "rank 2 called barrier, ranks 0-1 called all_reduce (float32 [4], sum), at In[4] line 3",
    ),
    "without a known line": (
        all_reduce(SUM, "float32 [2], sum", places=("", "")),
        "rank 0 called all_reduce with float32 [4], rank 1 with float32 [2]",
    ),
    "of another group": (
        called(
            ("broadcast", "float32 [4], root 0", LINE),
            ("broadcast", "float32 [4], root 1", LINE),
            group="group 1 (ranks 0-1)",
        ),
        "rank 0 called broadcast of group 1 (ranks 0-1) with root 0, rank 1 with root 1, "
        "at In[4] line 3",
    ),
    "a message": (
        called(
            ("send", "float32, 8 elements", "In[4] line 1"),
            ("recv", "float32, 4 elements", "In[4] line 2"),
            group="world 0->1",
        ),
        "rank 0 called send to rank 1 (float32, 8 elements) at In[4] line 1, rank 1 called recv "
        "from rank 0 (float32, 4 elements) at In[4] line 2",
    ),
    "more sides than can be told": (
        all_reduce(*(f"float32 [{n}], sum" for n in range(8))),
        "rank 0 called all_reduce with float32 [0], rank 1 with float32 [1], rank 2 with "
        "float32 [2], rank 3 with float32 [3], ranks 4-7 something else again, at In[4] line 3",
    ),
    "sizes of one rank": (
        called(
            ("all_to_all", "float32, send 1,1,1 receive 1,1,1", LINE),
            ("all_to_all", "float32, send 1,1,1 receive 1,1,1", LINE),
            ("all_to_all", "float32, send 1,1,1 receive 2,2,2", LINE),
        ),
        "rank 2 called all_to_all to receive 2 from rank 0, which sends 1 and to receive 2 from "
        "rank 1, which sends 1 (and 1 more), at In[4] line 3",
    ),
    "sizes of one message": (
        called(
            ("all_to_all", "float32, send 1,3 receive 1,1", LINE),
            ("all_to_all", "float32, send 1,1 receive 1,1", LINE),
        ),
        "rank 0 called all_to_all to send 3 to rank 1, which expects 1, at In[4] line 3",
    ),
}


@pytest.mark.parametrize(("mismatch", "text"), SENTENCES.values(), ids=SENTENCES)
def test_who_called_what(mismatch: Mismatch, text: str) -> None:
    assert mismatch_text(mismatch) == text


def test_what_several_ranks_have_seen_is_put_together() -> None:
    whole = all_reduce(SUM, SUM, "float32 [2], sum")
    seen = [Mismatch("world", 5, tuple(whole.calls[n] for n in part)) for part in [(0, 2), (1, 2)]]
    assert merged(seen) == whole


def test_what_to_do_names_the_operation() -> None:
    text = mismatch_remedy(all_reduce(SUM, "int32 [4], sum"))
    assert "operation 5 of the default group" in text
    assert "no tensor of it was changed" in text
    asynchronous = replace(all_reduce(SUM, SUM), is_async=True)
    assert "may have changed" in mismatch_remedy(asynchronous)
    assert merged([all_reduce(SUM, SUM), asynchronous]).is_async
    assert "message 5 from rank 0 to rank 1" in mismatch_remedy(called(group="world 0->1"))


def test_who_did_not_come() -> None:
    operation = Operation("all_reduce", "world", (0, 1, 2, 3), 5, SUM, LINE)
    overdue = TimedOut(operation, (2,), 3.0)
    assert late_text(overdue, (0, 1, 3), {2: "In[4] line 2"}) == (
        "rank 2 did not come to all_reduce (float32 [4], sum) within 3 s, in which ranks 0-1,3 "
        "waited at In[4] line 3; rank 2 was at In[4] line 2"
    )
    receive = Operation("recv", "world 2->0", (2, 0), 1, "float32, 4 elements", LINE)
    assert late_text(TimedOut(receive, (2,), 3.0), (0,), {2: "In[4] line 2"}) == (
        "rank 2 did not send to rank 0 within 3 s; rank 0 waited in recv from rank 2 "
        "(float32, 4 elements) at In[4] line 3; rank 2 was at In[4] line 2"
    )
    assert late_text(TimedOut(operation, (), 0.0), (1,), {}) == (
        "rank 1 waited in all_reduce (float32 [4], sum) at In[4] line 3, which did not end in time"
    )


@pytest.mark.parametrize(
    ("text", "ended"),
    [("no", "no."), ("no.", "no."), ("no!", "no!"), ("why? ", "why?"), ("see:", "see:")],
)
def test_a_sentence_ends_once(text: str, ended: str) -> None:
    assert sentence(text) == ended


# --- whatever is called ---------------------------------------------------------------------------

NAMES = st.sampled_from(["all_reduce", "broadcast", "barrier", "send", "recv", "all_to_all"])
DETAILS = st.one_of(
    st.sampled_from(["", SUM, "float32 [4]", "float32 [2], sum", "root 1", "float32, 3 elements"]),
    st.builds(
        lambda send, receive: (
            f"float32, send {','.join(map(str, send))} receive {','.join(map(str, receive))}"
        ),
        st.lists(st.integers(0, 3), max_size=4),
        st.lists(st.integers(0, 3), max_size=4),
    ),
)
PLACES = st.sampled_from(["", LINE, "In[4] line 9", "train.py line 1"])
GROUPS = st.sampled_from(["world", "world 0->1", "group 1 (ranks 0-3)", "group 1 (ranks 0-3) 0->1"])


@given(
    GROUPS,
    st.dictionaries(st.integers(0, 40), st.tuples(NAMES, DETAILS, PLACES), min_size=1),
)
def test_every_mismatch_has_a_sentence(group: str, calls: dict[int, tuple[str, str, str]]) -> None:
    mismatch = Mismatch(group, 1, tuple(Called(rank, *what) for rank, what in calls.items()))
    text = mismatch_text(mismatch)
    assert "\n" not in text
    assert "called" in text
    backwards = Mismatch(group, 1, tuple(reversed(mismatch.calls)))
    assert mismatch_text(backwards) == text
    kinds = {(name, detail) for name, detail, _ in calls.values()}
    if len(kinds) > 1 and " to send " not in text and " to receive " not in text:
        # The side that is named first has no more ranks than any other.
        fewest = min(sum(what[:2] == kind for what in calls.values()) for kind in kinds)
        first = min(
            (
                sorted(rank for rank, what in calls.items() if what[:2] == kind)
                for kind in kinds
                if sum(what[:2] == kind for what in calls.values()) == fewest
            ),
        )
        plural = "s" if len(first) > 1 else ""
        assert text.startswith(f"rank{plural} {format_ranks(first)} called ")
