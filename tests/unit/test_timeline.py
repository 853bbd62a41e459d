"""Who waited for whom, from records that are made up."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distsession.engine.collectives.operation_log import (
    FLAGS,
    IS_ASYNC,
    OPERATIONS,
    OperationLog,
    begin_wait,
    end,
)
from distsession.engine.collectives.operations import Elements, describe, size
from distsession.protocol.board import LINE_BITS
from distsession.protocol.operation_names import AnySource, SplitSizes
from distsession.timeline import chrome_trace, svg
from distsession.timeline.records import OperationRecord, RankTrace, TransferRecord
from distsession.timeline.timeline import Timeline
from distsession.timeline.waits import merge, shares, union, waits

MS = 1_000_000


def operation(
    sequence: int, began: float, ended: float, *, members: tuple[int, ...] = (0, 1), **more: Any
) -> OperationRecord:
    """Times in milliseconds."""
    facts = {"blocked": began, "name": "all_reduce", "group": "world", "size": 16, **more}
    return OperationRecord(
        members=members,
        sequence=sequence,
        detail=facts.pop("detail", "float32 [4], sum"),
        place=facts.pop("place", f"In[3] line {sequence}"),
        began=int(began * MS),
        ended=int(ended * MS),
        blocked=int(facts.pop("blocked") * MS),
        **facts,
    )


def trace(rank: int, *operations: OperationRecord, **more: Any) -> RankTrace:
    facts = {"label": "In[3]", "began": 0, "ended": 1000 * MS, **more}
    return RankTrace(rank, operations=operations, **facts)


def timeline(*traces: RankTrace, **more: Any) -> Timeline:
    return Timeline(merge(traces, **more), names={}, backend="gloo")


LATE = (
    trace(0, operation(1, 100, 610)),
    trace(1, operation(1, 600, 611)),
)


def test_the_last_member_is_waited_for() -> None:
    merged = merge(LATE)
    (early,), (late,) = merged.steps[0], merged.steps[1]
    assert (early.wait, early.run, early.late) == (500 * MS, 10 * MS, (1,))
    assert (late.wait, late.run, late.late) == (0, 11 * MS, ())
    assert timeline(*LATE).sentence == (
        "Rank 0 waited for rank 1: 0.50 s in all_reduce #1 at In[3] line 1."
    )


def test_times_of_another_host_are_shifted() -> None:
    shifted = merge(LATE, shifts={1: -450 * MS})
    assert shifted.steps[0][0].wait == 50 * MS
    assert shifted.began == -450 * MS


def test_an_operation_that_ended_before_another_rank_came_did_not_wait_for_it() -> None:
    merged = merge([trace(0, operation(1, 10, 20)), trace(1, operation(1, 500, 501))])
    assert (merged.steps[0][0].wait, merged.steps[0][0].run) == (10 * MS, 0)


def test_a_member_that_never_came_is_waited_for_until_the_end() -> None:
    shown = timeline(trace(0, operation(1, 100, 0)), trace(1, error="ValueError: no"))
    assert shown.sentence.startswith("Rank 0 waited for rank 1, which did not come: 0.90 s in")
    assert shown.notes == ("Rank 1 ended with ValueError: no",)


def test_a_member_whose_record_is_cut_short_is_not_blamed() -> None:
    merged = merge([trace(0, operation(1, 100, 900)), trace(1, dropped=3)])
    assert merged.steps[0][0].wait == 0


def test_who_receives_from_any_rank_waits_for_whoever_sends() -> None:
    any_source = {"name": "recv", "detail": "any source", "group": "world any->0"}
    mine = [
        operation(1, 100, 600, is_from_any=True, **any_source),
        operation(1, 600, 601, name="recv", group="world 1->0"),
    ]
    shown = timeline(trace(0, *mine), trace(1, operation(1, 590, 600, group="world 1->0")))
    assert shown.merged.steps[0][0].late == (1,)
    assert shown.sentence == "Rank 0 waited for rank 1: 0.50 s in recv #1 at In[3] line 1."


def test_waits_that_overlap_count_once() -> None:
    issued = [operation(n, 100 + n, 600, is_async=True, blocked=110, place="") for n in range(1, 4)]
    late = [operation(n, 590 + n, 600) for n in range(1, 4)]
    merged = merge([trace(0, *issued), trace(1, *late)])
    (wait,) = [found for found in waits(merged) if found.late == (1,)]
    assert wait.seconds[0] == pytest.approx(0.483)
    assert wait.count == 3


def test_a_backward_waits_from_its_last_operation_on() -> None:
    mine = [operation(n, 100 * n, 600, is_future=True, is_async=True, blocked=0) for n in (1, 2)]
    theirs = [operation(n, 500, 600) for n in (1, 2)]
    merged = merge([trace(0, *mine), trace(1, *theirs)])
    assert [step.held for step in merged.steps[0]] == [(200 * MS, 500 * MS)] * 2


def test_what_was_not_waited_for_holds_nobody() -> None:
    mine = operation(1, 100, 600, is_async=True, blocked=0)
    merged = merge([trace(0, mine), trace(1, operation(1, 500, 600))])
    assert (merged.steps[0][0].wait, merged.steps[0][0].held) == (400 * MS, None)
    assert shares(merged, 0).wait == 0


def test_short_waits_are_not_worth_a_name() -> None:
    shown = timeline(trace(0, operation(1, 100, 102)), trace(1, operation(1, 101, 102)))
    assert shown.sentence == "No rank waited long for another: 1.0 ms at most."
    assert timeline(trace(0), trace(1)).sentence == "The ranks called no collective."


def test_many_waits_are_told_together() -> None:
    mine = [operation(n, 100 * n, 100 * n + 50, members=(0, 1, 2)) for n in range(1, 5)]
    theirs = [operation(n, 100 * n + 40, 100 * n + 50, members=(0, 1, 2)) for n in range(1, 5)]
    shown = timeline(trace(0, *mine), trace(1, *mine), trace(2, *theirs), absent=[5])
    assert shown.sentence.startswith(
        "The others waited for rank 2: 0.16 s in 4 operations, the longest 40 ms in all_reduce #"
    )
    assert shown.notes == ("Rank 5 took part, and the record is gone with the process.",)


def test_transfers_near_the_cell_belong_to_it() -> None:
    moved = [
        TransferRecord("pull", 1, -900 * MS, -800 * MS),  # an earlier cell's
        TransferRecord("push", 2, -700 * MS, -600 * MS),
        TransferRecord("push", 3, -500 * MS, -100 * MS),
        TransferRecord("result", 4, 1100 * MS, 1200 * MS),
        TransferRecord("pull", 5, 2100 * MS, 2200 * MS),
        TransferRecord("pull", 6, 9000 * MS, 9100 * MS),
    ]
    merged = merge([trace(0, transfers=tuple(moved))])
    assert [transfer.size for transfer in merged.transfers[0]] == [2, 3, 4, 5]
    assert (merged.began, merged.ended) == (-700 * MS, 2200 * MS)


# --- for all records ------------------------------------------------------------------------------

times = st.integers(0, 1000)
records = st.builds(
    lambda sequence, began, length, blocked, flags, members: operation(
        sequence,
        began,
        began + length if length else 0,
        members=members,
        blocked=(began + blocked if blocked else 0) if flags[0] else began,
        is_async=flags[0],
        is_future=flags[0] and flags[1],
        failed=flags[2],
    ),
    st.integers(1, 5),
    times,
    times,
    times,
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from([(0, 1), (0, 1, 2), (1, 2), (2, 2)]),
)
traces = st.lists(
    st.tuples(st.lists(records, max_size=8), st.integers(0, 3), st.integers(0, 2000)),
    min_size=1,
    max_size=4,
).map(
    lambda ranks: [
        trace(
            rank,
            *sorted(ops, key=lambda o: o.began),
            dropped=max(0, dropped - 1),
            ended=ended * MS,
        )
        for rank, (ops, dropped, ended) in enumerate(ranks)
    ]
)


@given(traces)
def test_waits_are_never_negative_and_sums_fit(given_traces: list[RankTrace]) -> None:
    merged = merge(given_traces)
    for rank, steps in merged.steps.items():
        for step in steps:
            assert step.wait >= 0
            assert step.run >= 0
            assert step.wait + step.run == step.ended - step.record.began
            assert rank not in step.late
            if step.held is not None:
                assert step.late
                assert step.record.began <= step.held[0] < step.held[1] <= step.ended
                assert step.held[1] - step.held[0] <= step.wait
        share = shares(merged, rank)
        assert min(share.work, share.run, share.wait) >= -1e-9
        assert share.work + share.run + share.wait == pytest.approx(share.total)
    for wait in waits(merged):
        assert not set(wait.late) & set(wait.seconds)


@given(traces)
def test_whatever_was_recorded_can_be_shown_and_saved(given_traces: list[RankTrace]) -> None:
    shown = timeline(*given_traces)
    assert repr(shown).startswith(shown.sentence)
    parse(shown._repr_html_())
    events = chrome_trace.trace(shown.merged, {})["traceEvents"]
    assert json.loads(json.dumps(events)) == events
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "collective":
            span = event["ts"], event["ts"] + event["dur"]
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():  # those of one thread may touch, and not overlap
        assert all(b[0] >= a[1] for a, b in itertools.pairwise(spans))


@given(st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair)))))
def test_a_union_covers_the_same_and_overlaps_nowhere(spans: list[tuple[int, int]]) -> None:
    found = union(spans)
    covered = {t for a, b in spans for t in range(a, b)}
    assert {t for a, b in found for t in range(a, b)} == covered
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


# --- the picture ----------------------------------------------------------------------------------


def parse(page: str) -> ElementTree.Element:
    """The picture, which must be well-formed and need nothing from elsewhere."""
    found = re.search(r"<svg.*</svg>", page, re.DOTALL)
    assert found is not None
    addresses = set(re.findall(r"\w+://[^\"'\s)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "src=" not in page
    return ElementTree.fromstring(found[0])


def texts(page: str, tag: str) -> list[str]:
    name = f"{{http://www.w3.org/2000/svg}}{tag}"
    return ["".join(element.itertext()) for element in parse(page).iter(name)]


def test_the_picture_names_and_marks_the_late_rank() -> None:
    shown = timeline(*LATE)
    page = shown._repr_html_()
    root = parse(page)
    assert root.get("role") == "img"
    assert root.get("aria-label") == shown.sentence
    assert "▸ rank 1" in texts(page, "text")
    assert "rank 0" in texts(page, "text")
    titles = texts(page, "title")
    assert any(
        "all_reduce #1 on rank 0" in title and "waited for rank 1: 0.50 s" in title
        for title in titles
    )
    assert any("at In[3] line 1" in title and "16 B" in title for title in titles)


def test_the_picture_brings_the_script_that_enlarges_it() -> None:
    page = timeline(*LATE)._repr_html_()
    found = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert found is not None
    assert 'querySelectorAll(".distsession-timeline:' in found[1]
    assert page.count('class="distsession-timeline"') == 1
    box = page.partition('class="distsession-timeline"')[2]
    assert box.index("<svg") < box.index("data-span") < box.index("</svg></div>")


def test_the_picture_escapes_what_the_user_wrote() -> None:
    evil = "<script>alert('&\"')</script>"
    one = operation(1, 10, 900, place=evil, detail=evil, name=evil)
    shown = timeline(trace(0, one, label=evil, error=evil), trace(1))
    page = shown._repr_html_()
    assert evil not in page
    assert any(evil in title for title in texts(page, "title"))


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_many_operations_make_no_large_picture(ranks: int) -> None:
    many = [operation(n, n / 10, n / 10 + 0.08, members=(0,)) for n in range(1, 5001)]
    shown = timeline(*(trace(rank, *many) for rank in range(ranks)))
    page = shown._repr_html_()
    assert len(page) < 1_500_000
    counted = [re.match(r"([\d,]+) operations on rank 0", t) for t in texts(page, "title")]
    together = sum(int(c[1].replace(",", "")) for c in counted if c)
    single = sum(t.startswith("all_reduce #") and "on rank 0" in t for t in texts(page, "title"))
    assert together + single == 5000


def test_a_cell_that_took_no_time_can_be_drawn() -> None:
    parse(timeline(trace(0, ended=0))._repr_html_())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(123.4, "123.4 s"), (0.31, "0.31 s"), (0.042, "42 ms"), (0.0042, "4.2 ms"), (1e-5, "10 us")],
)
def test_seconds_are_written_short(seconds: float, text: str) -> None:
    assert svg.seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(16, "16 B"), (4200, "4.2 kB"), (1_300_000_000, "1.3 GB"), (0, "0 B")]
)
def test_sizes_are_written_short(count: int, text: str) -> None:
    assert svg.size_text(count) == text


# --- torch's profiler -----------------------------------------------------------------------------


def test_events_of_a_profile_are_moved_to_their_rank_and_time() -> None:
    written = {
        "baseTimeNanoseconds": 5_000 * MS,
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 77, "args": {"name": "main"}},
            {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 2_000_000.0, "dur": 5.0},
            {"ph": "s", "name": "ac2g", "id": 3, "pid": 77, "tid": 77, "ts": 2_000_001.0},
            {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 2_000_002.0, "dur": 1.0},
            {"ph": "X", "name": "whole", "pid": "Spans", "tid": "x", "ts": 1.0, "dur": 1.0},
            {"ph": "i", "name": "end", "pid": "", "tid": "", "ts": 1.0},
        ],
    }
    # 1970 + 7 s is 10 ms after the cell began, at 50 ms of the rank's clock.
    known = trace(
        1,
        began=50 * MS,
        ended=100 * MS,
        epoch=7_000 * MS - 60 * MS,
        profile=json.dumps(written).encode(),
    )
    events = chrome_trace.trace(merge([known]), {})["traceEvents"]
    (product,) = [e for e in events if e["name"] == "aten::mm"]
    assert (product["pid"], product["ts"], product["dur"]) == (1, pytest.approx(10_000), 5.0)
    (kernel,) = [e for e in events if e["name"] == "kernel"]
    assert kernel["pid"] == 1
    assert kernel["tid"] != product["tid"]
    assert next(e for e in events if e["name"] == "ac2g")["id"] == "1.3"
    assert not [e for e in events if e["name"] in ("whole", "end")]
    assert "torch: main" in [e["args"].get("name") for e in events if e["ph"] == "M"]


# --- what a rank keeps ----------------------------------------------------------------------------

F32 = torch.float32


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (("all_reduce", F32, torch.Size([4, 2]), "sum"), 32),
        (("all_reduce_coalesced", F32, torch.Size([4]), torch.int64, torch.Size([2]), "sum"), 32),
        (("barrier",), 0),
        (("broadcast", torch.bfloat16, torch.Size([]), "root 0"), 2),
        (("send", F32, Elements(12)), 48),
        (("recv", AnySource()), 0),
        (("all_to_all", F32, SplitSizes((1, 2), (3, 4))), 12),
        (("all_to_all_single", F32, torch.Size([5]), SplitSizes((1, 2), (3, 4))), 60),
    ],
)
def test_the_bytes_of_an_operation_are_what_the_rank_puts_in(
    key: tuple[Any, ...], expected: int
) -> None:
    assert size(key) == expected
    assert describe(key).split(" ")[0] == key[0]


class Stream:
    """As much of a stream as a record needs."""

    name = "world"
    members = (0, 1)


def entry(sequence: int, began: int = 5) -> list[Any]:
    return [Stream, sequence, ("barrier",), 3 << LINE_BITS | 7, began, 0, 0, 0]


def test_a_log_knows_what_receives_from_any_rank() -> None:
    log = OperationLog({})
    for key in (("recv", AnySource()), ("recv", AnySource(3)), ("recv", torch.float32)):
        log.append([Stream, 1, key, 0, 5, 0, 0, 0])
    assert [record.is_from_any for record in log.records()] == [True, True, False]


def test_a_log_keeps_the_last_operations() -> None:
    log = OperationLog({3: "In[2]"})
    for number in range(OPERATIONS + 10):
        log.count += 1
        log.append(entry(number))
    found = log.records()
    assert log.count - len(found) == 10
    assert (found[0].sequence, found[-1].sequence) == (10, OPERATIONS + 9)
    assert found[0].place == "In[2] line 7"
    assert found[0].blocked == found[0].began


def test_an_operation_that_is_over_when_it_is_waited_for_ends_then() -> None:
    log, asynchronous = OperationLog({}), entry(1)
    asynchronous[FLAGS] |= IS_ASYNC
    log.append(asynchronous)
    assert (log.records()[0].blocked, log.records()[0].ended) == (0, 0)
    begin_wait(asynchronous, is_over=True)
    end(asynchronous)
    (record,) = log.records()
    assert record.blocked == record.ended > 0
    assert record.is_async
