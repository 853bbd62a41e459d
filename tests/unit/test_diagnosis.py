"""From the ranks' reports to who waits for whom.

The file is long because it is a list of cases, each built by the same few functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.protocol import diagnosis
from distsession.protocol.board import key_of
from distsession.protocol.diagnosis import Kind, Verdict, describe_operation, diagnose
from distsession.protocol.messages import (
    LIMITED_STORE_WAIT,
    STORE_WAIT,
    Left,
    Operation,
    RankReport,
)
from distsession.protocol.rank_state import NO_PART, AbortReason, Ending, Outcome, RankState

Reports = dict[int, RankReport]

SUM = Operation("all_reduce", "world", (0, 1, 2, 3), 5, "float32 [4], sum", "In[3] line 2", 12.4)
TP = Operation("broadcast", "tp", (0, 1), 2, "float32 [8], root 0", "In[3] line 5", 3.0)
SUM_TEXT = "all_reduce #5 (float32 [4], sum) at In[3] line 2"
TP_TEXT = "broadcast #2 of tp (float32 [8], root 0) at In[3] line 5"
NO_WAIT = " No wait can help."
OTHER_ORDER = "The ranks issue their operations in different orders."


def on(rank: int, state: str, **facts: Any) -> Reports:
    return {rank: RankReport(rank, state, **facts)}


def failure(error: str) -> Outcome:
    ename, _, evalue = error.partition(": ")
    return Outcome(Ending.FAILED, evalue, ename)


def is_failure(report: RankReport) -> bool:
    return report.outcome is not None and report.outcome.ending is Ending.FAILED


def waiting(*ranks: int, op: Operation = SUM, **sequences: int) -> Reports:
    """Some ranks that are blocked in an operation, and what else they have begun."""
    begun = {**sequences, op.group: op.sequence}
    report = RankReport(0, "running", place=op.place, operations=(op,), sequences=begun)
    return {rank: replace(report, rank=rank) for rank in ranks}


def computing(*ranks: int, line: int = 7, **sequences: int) -> Reports:
    place = f"In[3] line {line}"
    return {r: RankReport(r, "running", place=place, sequences=sequences) for r in ranks}


def finished(*ranks: int, **sequences: int) -> Reports:
    return {
        r: RankReport(r, "idle", outcome=Outcome(Ending.FINISHED), sequences=sequences)
        for r in ranks
    }


def failed(rank: int, error: str = "ValueError: x") -> Reports:
    return on(rank, "idle", outcome=failure(error))


def dead(rank: int, how: str = "killed by SIGKILL") -> Reports:
    return on(rank, "dead", outcome=Outcome(Ending.DIED, how))


def pair(name: str, source: int, target: int, place: str, sequence: int = 1) -> Operation:
    toward = f"to {target}" if name == "send" else f"from {source}"
    group, members = f"world {source}->{target}", (source, target)
    return Operation(name, group, members, sequence, f"float32 [2], {toward}", place, 2.0)


RECV_BY_0 = pair("recv", 1, 0, "In[5] line 2")
SEND_BY_1 = pair("send", 1, 0, "In[5] line 5")
RECV_BY_1 = pair("recv", 0, 1, "In[5] line 3")
SEND_BY_0 = pair("send", 0, 1, "In[5] line 4")
ON_A = Operation("all_reduce", "a", (0, 1), 3, "float32 [4], sum", "In[5] line 2", 9.0)
ON_B = Operation("all_reduce", "b", (0, 1), 2, "float32 [4], sum", "In[5] line 3", 9.0)
ON_A_TEXT = "all_reduce #3 of a (float32 [4], sum) at In[5] line 2"
ON_B_TEXT = "all_reduce #2 of b (float32 [4], sum) at In[5] line 3"
ANY = Operation("recv", "world any->0", (0, 1, 2), 1, "any source", "In[5] line 6", 9.0)
ANY_TEXT = "recv #1 (any source) at In[5] line 6"
RING = [Operation("barrier", f"g{i}", (i, (i + 1) % 3), 1, "", f"In[5] line {i}") for i in range(3)]
CHAIN = [Operation("barrier", f"g{i}", (i, i + 1), 1, "", f"In[5] line {i}") for i in range(3)]


@dataclass(frozen=True)
class Case:
    """Reports, and the verdict that they have to lead to."""

    id: str
    reports: Reports
    kind: Kind
    sentence: str
    waiting: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    failed: bool = False
    has_left: bool = False

    @property
    def verdict(self) -> Verdict:
        reason = AbortReason.FAILED if self.failed else AbortReason.HANG
        if self.kind is Kind.ORDER:
            reason = AbortReason.MISMATCH
        facts = self.waiting, self.missing, self.failed, reason
        return Verdict(self.kind, self.sentence, *facts, has_left=self.has_left)


def nothing(id: str, reports: Reports, sentence: str) -> Case:
    return Case(id, reports, Kind.NOTHING, sentence)


NOTHING = [
    nothing("no reports", {}, "no rank has reported."),
    nothing("all idle", on(0, "idle") | on(1, "idle"), "nothing runs: ranks 0-1 are idle."),
    nothing(
        "nothing runs and one is dead",
        on(0, "idle") | dead(1),
        "nothing runs: rank 1 died (killed by SIGKILL); rank 0 is idle.",
    ),
    nothing(
        "all compute",
        computing(0, 1) | computing(2, line=8),
        "no rank waits for a missing one: ranks 0-1 run In[3] line 7; rank 2 runs In[3] line 8.",
    ),
    nothing(
        "some are done",
        computing(0) | finished(1, 2) | failed(3),
        "no rank waits for a missing one: rank 3 failed (ValueError: x); "
        "ranks 1-2 finished their part; rank 0 runs In[3] line 7.",
    ),
    nothing(
        "one is stopped while nothing waits",
        on(0, "stopped") | on(1, "idle"),
        "no rank waits for a missing one: rank 0 is stopped (SIGSTOP): kill -CONT lets it go on; "
        "rank 1 is idle.",
    ),
    nothing(
        "one is in its debugger and one asks",
        on(0, "debugging", place="In[3] line 4") | on(1, "waiting for input"),
        "no rank waits for a missing one: rank 0 is in the debugger at In[3] line 4; "
        "rank 1 waits for input.",
    ),
    nothing(
        "all are in the operation",
        waiting(0, 1, 2, 3),
        f"no rank waits for a missing one: ranks 0-3 are in {SUM_TEXT}.",
    ),
    nothing(
        "some have already left the operation",
        waiting(0, 1) | computing(2, world=5) | finished(3, world=6),
        "no rank waits for a missing one: rank 3 finished its part; "
        f"ranks 0-1 are in {SUM_TEXT}; rank 2 runs In[3] line 7.",
    ),
    nothing(
        "one has begun it asynchronously",
        waiting(0, 1, 2)
        | on(3, "running", place="x", operations=(replace(SUM, is_waiting=False),)),
        f"no rank waits for a missing one: ranks 0-2 are in {SUM_TEXT}; rank 3 runs x.",
    ),
    nothing(
        "an asynchronous operation blocks nobody",
        on(0, "running", operations=(replace(SUM, is_waiting=False),), sequences={"world": 5})
        | finished(1),
        "no rank waits for a missing one: rank 1 finished its part; rank 0 runs its code.",
    ),
    nothing(
        "others than members have finished",
        waiting(0, 1, op=TP) | finished(2) | dead(3),
        "no rank waits for a missing one: rank 3 died (killed by SIGKILL); "
        f"rank 2 finished its part; ranks 0-1 are in {TP_TEXT}.",
    ),
    nothing(
        "members without a report",
        waiting(0, 1),
        f"no rank waits for a missing one: ranks 0-1 are in {SUM_TEXT}.",
    ),
    nothing(
        "send meets recv",
        waiting(0, op=SEND_BY_0) | waiting(1, op=RECV_BY_1),
        "no rank waits for a missing one: rank 0 is in send #1 (float32 [2], to 1) at "
        "In[5] line 4; rank 1 is in recv #1 (float32 [2], from 0) at In[5] line 3.",
    ),
    nothing(
        "different operations meet",
        waiting(0, op=TP) | waiting(1, op=replace(TP, name="barrier", detail="")),
        f"no rank waits for a missing one: rank 0 is in {TP_TEXT}; "
        "rank 1 is in barrier #2 of tp at In[3] line 5. "
        "As operation #2 of tp the ranks call barrier and broadcast, which do not match.",
    ),
]


def wait(id: str, one: Reports, does: str, **verdict: Any) -> Case:
    """Rank 1 is late; the other three wait for it in the same all_reduce."""
    sentence = f"ranks 0,2-3 wait in {SUM_TEXT} (for 12 s) for rank 1, which {does}."
    facts = {"waiting": (0, 2, 3), "missing": (1,), **verdict}
    return Case(id, waiting(0, 2, 3) | one, Kind.WAIT, sentence, **facts)


WAIT = [
    Case(
        "whoever sends first may still come",
        waiting(0, op=ANY) | finished(1) | computing(2),
        Kind.WAIT,
        f"rank 0 waits in {ANY_TEXT} (for 9 s) for a message from rank 1, which finished its part "
        "without it; rank 2, which runs In[3] line 7.",
        (0,),
        (1, 2),
    ),
    Case(
        "several that run their code",
        waiting(0) | {r: RankReport(r, "running") for r in (1, 2, 3)},
        Kind.WAIT,
        f"rank 0 waits in {SUM_TEXT} (for 12 s) for ranks 1-3, which run their code.",
        (0,),
        (1, 2, 3),
    ),
    wait("one is late", computing(1, world=4), "runs In[3] line 7"),
    wait("one is late somewhere", on(1, "running"), "runs its code"),
    wait("one has no part in the run", on(1, "idle"), "is idle: nothing runs on it"),
    wait(
        "one is stopped",
        on(1, "stopped"),
        "is stopped (SIGSTOP): kill -CONT lets it go on",
    ),
    wait(
        "one is stopped inside the operation",
        on(1, "stopped", operations=(SUM,), sequences={"world": 5}),
        "is stopped (SIGSTOP): kill -CONT lets it go on",
    ),
    wait("one is debugged", on(1, "traced"), "is held by a debugger"),
    wait(
        "one is debugged inside the operation",
        on(1, "traced", operations=(SUM,), sequences={"world": 5}),
        "is held by a debugger",
    ),
    wait(
        "one is silent",
        on(1, "silent"),
        "does not answer: it computes in C code that holds the interpreter's lock, or gets no "
        "processor time",
    ),
    wait("one is in a state that nobody knows", on(1, "odd"), "is odd"),
    Case(
        "two are late",
        waiting(0, 3) | computing(1, 2),
        Kind.WAIT,
        f"ranks 0,3 wait in {SUM_TEXT} (for 12 s) for ranks 1-2, which run In[3] line 7.",
        (0, 3),
        (1, 2),
    ),
    Case(
        "three are late for three reasons",
        waiting(0) | computing(1) | on(2, "idle") | on(3, "traced"),
        Kind.WAIT,
        f"rank 0 waits in {SUM_TEXT} (for 12 s) for rank 3, which is held by a debugger; "
        "rank 1, which runs In[3] line 7; rank 2, which is idle: nothing runs on it.",
        (0,),
        (1, 2, 3),
    ),
    Case(
        "all are halted",
        waiting(0) | on(1, "stopped") | on(2, "stopped") | on(3, "silent"),
        Kind.WAIT,
        f"rank 0 waits in {SUM_TEXT} (for 12 s) for ranks 1-2, which are stopped (SIGSTOP): "
        "kill -CONT lets them go on; rank 3, which does not answer: it computes in C code that "
        "holds the interpreter's lock, or gets no processor time.",
        (0,),
        (1, 2, 3),
    ),
    Case(
        "two wait for one that is in another operation, which can complete",
        waiting(2, 3) | waiting(0, 1, op=TP),
        Kind.WAIT,
        f"ranks 2-3 wait in {SUM_TEXT} (for 12 s) for ranks 0-1, which are in {TP_TEXT}.",
        (2, 3),
        (0, 1),
    ),
    Case(
        "a chain that ends at one who computes",
        waiting(0, op=CHAIN[0]) | waiting(1, op=CHAIN[1]) | computing(2),
        Kind.WAIT,
        "rank 0 waits in barrier #1 of g0 at In[5] line 0 for rank 1, which waits elsewhere. "
        "Rank 1 waits in barrier #1 of g1 at In[5] line 1 for rank 2, which runs In[3] line 7.",
        (0, 1),
        (1, 2),
    ),
    Case(
        "a recv waits for a rank that computes",
        waiting(0, op=RECV_BY_0) | computing(1),
        Kind.WAIT,
        "rank 0 waits in recv #1 (float32 [2], from 1) at In[5] line 2 (for 2 s) for rank 1, "
        "which runs In[3] line 7.",
        (0,),
        (1,),
    ),
    Case(
        "the second send has no recv yet",
        waiting(0, op=replace(SEND_BY_0, sequence=2)) | computing(1, **{"world 0->1": 1}),
        Kind.WAIT,
        "rank 0 waits in send #2 (float32 [2], to 1) at In[5] line 4 (for 2 s) for rank 1, "
        "which runs In[3] line 7.",
        (0,),
        (1,),
    ),
    Case(
        "a wait of less than a second is not timed, and the longest counts",
        waiting(0, op=replace(TP, members=(0, 1, 2), seconds=0.9))
        | waiting(2, op=replace(TP, members=(0, 1, 2), seconds=0.2))
        | computing(1),
        Kind.WAIT,
        f"ranks 0,2 wait in {TP_TEXT} for rank 1, which runs In[3] line 7.",
        (0, 2),
        (1,),
    ),
    Case(
        "the longest wait counts",
        waiting(0) | waiting(2, op=replace(SUM, seconds=21.0)) | computing(1, 3),
        Kind.WAIT,
        f"ranks 0,2 wait in {SUM_TEXT} (for 21 s) for ranks 1,3, which run In[3] line 7.",
        (0, 2),
        (1, 3),
    ),
    Case(
        "different shapes of one operation",
        waiting(0) | waiting(2, op=replace(SUM, detail="float32 [5], sum")) | computing(1, 3),
        Kind.WAIT,
        "ranks 0,2 wait in all_reduce #5 (float32 [4], sum or float32 [5], sum) at In[3] line 2 "
        "(for 12 s) for ranks 1,3, which run In[3] line 7.",
        (0, 2),
        (1, 3),
    ),
]


def deadlock(id: str, one: Reports, does: str, failed: bool = False) -> Case:
    """Rank 1 never comes; the other three wait for it in the same all_reduce."""
    sentence = f"rank 1 did not come to {SUM_TEXT}: it {does}; ranks 0,2-3 wait.{NO_WAIT}"
    reports = waiting(0, 2, 3) | one
    return Case(id, reports, Kind.DEADLOCK, sentence, (0, 2, 3), (1,), failed)


DEADLOCK = [
    Case(
        "nobody is left to send anything",
        waiting(0, op=ANY) | finished(1) | failed(2, "OSError: no disk."),
        Kind.DEADLOCK,
        f"ranks 1-2 sent nothing for {ANY_TEXT}: rank 2 failed (OSError: no disk.), "
        "rank 1 finished its part without it; rank 0 waits." + NO_WAIT,
        (0,),
        (1, 2),
        failed=True,
    ),
    Case(
        "who could send waits for the one that receives",
        waiting(0, op=ANY) | waiting(1, op=pair("recv", 0, 1, "In[5] line 9")) | finished(2),
        Kind.DEADLOCK,
        f"ranks 1-2 sent nothing for {ANY_TEXT}: rank 2 finished its part without it, rank 1 waits "
        "elsewhere; rank 0 waits. Rank 0 sent nothing for recv #1 (float32 [2], from 0) at "
        "In[5] line 9: it waits elsewhere; rank 1 waits." + NO_WAIT,
        (0, 1),
        (0, 1, 2),
    ),
    Case(
        "a rank that has no part",
        waiting(0) | on(1, "idle", outcome=NO_PART) | finished(2, 3, world=5),
        Kind.DEADLOCK,
        f"rank 1 did not come to {SUM_TEXT}: it has no part in this run; rank 0 waits." + NO_WAIT,
        (0,),
        (1,),
    ),
    deadlock("one finished", finished(1, world=4), "finished its part without it"),
    deadlock("one failed", failed(1), "failed (ValueError: x)", failed=True),
    deadlock(
        "one failed with a long message",
        failed(1, "ValueError: x\nand more"),
        "failed (ValueError: x)",
        failed=True,
    ),
    deadlock(
        "one failed without a word",
        on(1, "idle", outcome=Outcome(Ending.FAILED)),
        "failed",
        failed=True,
    ),
    deadlock("one died", dead(1), "died (killed by SIGKILL)", failed=True),
    deadlock("one died, nobody knows how", dead(1, ""), "died", failed=True),
    deadlock(
        "one died inside the operation",
        on(
            1,
            "dead",
            outcome=Outcome(Ending.DIED, "exit code 3"),
            operations=(SUM,),
            sequences={"world": 5},
        ),
        "died (exit code 3)",
        failed=True,
    ),
    Case(
        "two finished",
        waiting(0, 3) | finished(1, 2),
        Kind.DEADLOCK,
        f"ranks 1-2 did not come to {SUM_TEXT}: they finished their part without it; ranks 0,3 "
        "wait." + NO_WAIT,
        (0, 3),
        (1, 2),
    ),
    Case(
        "died, failed and finished: the gravest first",
        waiting(0) | finished(1) | failed(2) | dead(3),
        Kind.DEADLOCK,
        f"ranks 1-3 did not come to {SUM_TEXT}: rank 3 died (killed by SIGKILL), "
        "rank 2 failed (ValueError: x), rank 1 finished its part without it; rank 0 waits."
        + NO_WAIT,
        (0,),
        (1, 2, 3),
        failed=True,
    ),
    Case(
        "finished, late and stopped",
        waiting(0) | finished(1) | computing(2) | on(3, "stopped"),
        Kind.DEADLOCK,
        f"ranks 1-3 did not come to {SUM_TEXT}: rank 1 finished its part without it, rank 3 "
        "is stopped (SIGSTOP): kill -CONT lets it go on, rank 2 runs In[3] line 7; rank 0 waits."
        + NO_WAIT,
        (0,),
        (1, 2, 3),
    ),
    Case(
        "a chain that ends at one who finished",
        waiting(0, op=CHAIN[0]) | waiting(1, op=CHAIN[1]) | finished(2),
        Kind.DEADLOCK,
        "rank 2 did not come to barrier #1 of g1 at In[5] line 1: it finished its part without it; "
        "rank 1 waits. Rank 1 did not come to barrier #1 of g0 at In[5] line 0: it waits "
        "elsewhere; rank 0 waits." + NO_WAIT,
        (0, 1),
        (1, 2),
    ),
    Case(
        "a longer chain that ends at one who died",
        waiting(0, op=CHAIN[0]) | waiting(1, op=CHAIN[1]) | waiting(2, op=CHAIN[2]) | dead(3),
        Kind.DEADLOCK,
        "rank 3 did not come to barrier #1 of g2 at In[5] line 2: it died (killed by SIGKILL); "
        "rank 2 waits. Rank 1 did not come to barrier #1 of g0 at In[5] line 0: it waits "
        "elsewhere; rank 0 waits. Rank 2 did not come to barrier #1 of g1 at In[5] line 1: it "
        "waits elsewhere; rank 1 waits." + NO_WAIT,
        (0, 1, 2),
        (1, 2, 3),
        failed=True,
    ),
    Case(
        "a recv from one who finished",
        waiting(0, op=RECV_BY_0) | finished(1),
        Kind.DEADLOCK,
        "rank 1 sent nothing for recv #1 (float32 [2], from 1) at In[5] line 2: it finished its "
        "part without it; rank 0 waits." + NO_WAIT,
        (0,),
        (1,),
    ),
    Case(
        "a cycle that a dead rank explains",
        waiting(0, op=replace(ON_A, members=(0, 1, 2))) | waiting(1, op=ON_B) | dead(2),
        Kind.DEADLOCK,
        f"ranks 1-2 did not come to {ON_A_TEXT}: rank 2 died (killed by SIGKILL), rank 1 waits "
        f"elsewhere; rank 0 waits. Rank 0 did not come to {ON_B_TEXT}: it waits elsewhere; "
        "rank 1 waits." + NO_WAIT,
        (0, 1),
        (0, 1, 2),
        failed=True,
    ),
    Case(
        "a deadlock, a wait, and one that computes",
        waiting(0, op=TP)
        | finished(1)
        | waiting(2, op=pair("recv", 3, 2, "In[3] line 9"))
        | computing(3),
        Kind.DEADLOCK,
        f"rank 1 did not come to {TP_TEXT}: it finished its part without it; rank 0 waits. "
        "No wait can help. Rank 2 waits in recv #1 (float32 [2], from 3) at In[3] line 9 "
        "for rank 3, which runs In[3] line 7.",
        (0,),
        (1,),
    ),
    Case(
        "the failure of a rank that only late ones miss is none of the deadlock's",
        waiting(0, op=TP) | finished(1) | failed(2),
        Kind.DEADLOCK,
        f"rank 1 did not come to {TP_TEXT}: it finished its part without it; rank 0 waits."
        + NO_WAIT,
        (0,),
        (1,),
    ),
]

DEADLOCK += [
    Case(
        "the gravest reason of a wait decides what is said first",
        waiting(0, op=pair("recv", 1, 0, "In[3] line 9"))
        | failed(1)
        | waiting(2, op=replace(TP, members=(2, 3, 4)))
        | finished(3)
        | dead(4),
        Kind.DEADLOCK,
        f"ranks 3-4 did not come to {TP_TEXT}: rank 4 died (killed by SIGKILL), rank 3 "
        "finished its part without it; rank 2 waits. Rank 1 sent nothing for recv #1 (float32 "
        "[2], from 1) at In[3] line 9: it failed (ValueError: x); rank 0 waits." + NO_WAIT,
        (0, 2),
        (1, 3, 4),
        failed=True,
    ),
    Case(
        "a rank that runs again has not failed",
        waiting(0) | on(1, "running", outcome=failure("ValueError: x")) | finished(2),
        Kind.DEADLOCK,
        f"ranks 1-2 did not come to {SUM_TEXT}: rank 2 finished its part without it, "
        "rank 1 runs its code; rank 0 waits." + NO_WAIT,
        (0,),
        (1, 2),
    ),
]


CIRCLE = (
    f"rank 0 waits in {ON_A_TEXT}, rank 1 in {ON_B_TEXT}: each waits for the other. {OTHER_ORDER}"
)
ORDER = [
    Case(
        "each waits for a message from anybody",
        waiting(0, op=ANY) | waiting(1, 2, op=replace(ANY, group="world any->1")),
        Kind.ORDER,
        f"ranks 0-2 wait in {ANY_TEXT}: each waits for another of them. No rank is left that "
        "could send something.",
        (0, 1, 2),
        (0, 1, 2),
    ),
    Case(
        "two groups in different orders",
        waiting(0, op=ON_A, b=1) | waiting(1, op=ON_B, a=2),
        Kind.ORDER,
        CIRCLE,
        (0, 1),
        (0, 1),
    ),
    Case(
        "two groups in different orders, while one computes and one finished",
        waiting(0, op=ON_A) | waiting(1, op=ON_B) | computing(2) | finished(3),
        Kind.ORDER,
        CIRCLE,
        (0, 1),
        (0, 1),
    ),
    Case(
        "two groups in different orders, and others who wait for these",
        waiting(0, op=ON_A) | waiting(1, op=ON_B) | waiting(2, 3),
        Kind.ORDER,
        f"rank 0 waits in {ON_A_TEXT}, rank 1 in {ON_B_TEXT}, ranks 2-3 in {SUM_TEXT}: "
        f"each waits for another of them. {OTHER_ORDER}",
        (0, 1, 2, 3),
        (0, 1),
    ),
    Case(
        "recv faces recv",
        waiting(0, op=RECV_BY_0) | waiting(1, op=RECV_BY_1),
        Kind.ORDER,
        "rank 0 waits in recv #1 (float32 [2], from 1) at In[5] line 2, rank 1 in recv #1 "
        "(float32 [2], from 0) at In[5] line 3: each waits for the other. All of them receive "
        "first.",
        (0, 1),
        (0, 1),
    ),
    Case(
        "a recv faces a collective",
        waiting(0, op=RECV_BY_0) | waiting(1, 2, op=replace(SUM, members=(0, 1, 2))),
        Kind.ORDER,
        "rank 0 waits in recv #1 (float32 [2], from 1) at In[5] line 2, ranks 1-2 in "
        f"{SUM_TEXT}: each waits for the other. {OTHER_ORDER}",
        (0, 1, 2),
        (0, 1),
    ),
    Case(
        "three in a ring",
        {r: report for i, op in enumerate(RING) for r, report in waiting(i, op=op).items()},
        Kind.ORDER,
        "rank 0 waits in barrier #1 of g0 at In[5] line 0, rank 1 in barrier #1 of g1 at In[5] "
        "line 1, rank 2 in barrier #1 of g2 at In[5] line 2: each waits for another of them. "
        + OTHER_ORDER,
        (0, 1, 2),
        (0, 1, 2),
    ),
    Case(
        "two sides of two ranks, and a late one",
        waiting(0, 2, op=replace(ON_A, members=(0, 1, 2, 3)))
        | waiting(1, 3, op=replace(ON_B, members=(0, 1, 2, 3)))
        | waiting(4, op=pair("recv", 5, 4, "In[5] line 9"))
        | computing(5),
        Kind.ORDER,
        f"ranks 0,2 wait in {ON_A_TEXT}, ranks 1,3 in {ON_B_TEXT}: each waits for the other. "
        f"{OTHER_ORDER} Rank 4 waits in recv #1 (float32 [2], from 5) at In[5] line 9 for "
        "rank 5, which runs In[3] line 7.",
        (0, 1, 2, 3),
        (0, 1, 2, 3),
    ),
]

LEFT, PUT_AWAY = Left("In[3] line 1", True, (1, 0)), Left("In[3] line 1", False, (1, 0))
IN_WORLD = replace(SUM, stream_key=key_of(1, 0, "world"))
IN_TP = replace(TP, stream_key=key_of(1, 0, "tp"))


def left(reports: Reports, *ranks: int, group: str = "world", how: Left = LEFT) -> Reports:
    """The same ranks, some of which have left a group."""
    gone = {group: how}
    return {
        rank: replace(report, left=gone) if rank in ranks else report
        for rank, report in reports.items()
    }


LEAVING = [
    Case(
        "one has left the group and computes",
        waiting(0, 2, 3, op=IN_WORLD) | left(computing(1), 1),
        Kind.DEADLOCK,
        f"rank 1 left the session's group at In[3] line 1: ranks 0,2-3 wait in {SUM_TEXT} for "
        f"rank 1.{NO_WAIT}",
        (0, 2, 3),
        (1,),
        has_left=True,
    ),
    Case(
        "one has left a smaller group, and another is late",
        waiting(0, op=IN_TP) | left(computing(1), 1, group="tp") | computing(2, 3),
        Kind.DEADLOCK,
        f"rank 1 left tp at In[3] line 1: rank 0 waits in {TP_TEXT} for rank 1.{NO_WAIT}",
        (0,),
        (1,),
        has_left=True,
    ),
    Case(
        "one has left and one is late",
        waiting(0, 2, op=IN_WORLD) | left(computing(1), 1) | computing(3),
        Kind.DEADLOCK,
        f"rank 1 left the session's group at In[3] line 1: ranks 0,2 wait in {SUM_TEXT} for rank "
        f"1; rank 3, which runs In[3] line 7.{NO_WAIT}",
        (0, 2),
        (1, 3),
        has_left=True,
    ),
    Case(
        "one has left after it had begun the operation",
        waiting(0, op=IN_WORLD) | left(finished(1, 2, 3, world=5), 1),
        Kind.NOTHING,
        f"no rank waits for a missing one: ranks 1-3 finished their part; rank 0 is in {SUM_TEXT}.",
    ),
    Case(
        "one has another default group, and computes",
        waiting(0, 2, 3, op=IN_WORLD) | left(computing(1), 1, how=PUT_AWAY),
        Kind.WAIT,
        f"ranks 0,2-3 wait in {SUM_TEXT} (for 12 s) for rank 1, which runs In[3] line 7.",
        (0, 2, 3),
        (1,),
    ),
    Case(
        "one has another default group, and has ended its part",
        waiting(0, 2, 3, op=IN_WORLD) | left(finished(1), 1, how=PUT_AWAY),
        Kind.DEADLOCK,
        f"rank 1 left the session's group at In[3] line 1: ranks 0,2-3 wait in {SUM_TEXT} for "
        f"rank 1.{NO_WAIT}",
        (0, 2, 3),
        (1,),
    ),
    Case(
        "all have destroyed the group, and use it still",
        left(waiting(0, 2, 3, op=IN_WORLD) | computing(1), 0, 1, 2, 3),
        Kind.WAIT,
        f"ranks 0,2-3 wait in {SUM_TEXT} (for 12 s) for rank 1, which runs In[3] line 7.",
        (0, 2, 3),
        (1,),
    ),
    Case(
        "one has left a group that had that name before",
        waiting(0, 2, 3, op=replace(SUM, stream_key=key_of(1, 1, "world"))) | left(computing(1), 1),
        Kind.WAIT,
        f"ranks 0,2-3 wait in {SUM_TEXT} (for 12 s) for rank 1, which runs In[3] line 7.",
        (0, 2, 3),
        (1,),
    ),
]


CASES = [pytest.param(case, id=case.id) for case in NOTHING + WAIT + DEADLOCK + LEAVING + ORDER]


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_its_verdict(case: Case) -> None:
    assert diagnose(case.reports) == case.verdict


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_the_reports_is_nothing(case: Case) -> None:
    backward = dict(sorted(case.reports.items(), reverse=True))
    assert diagnose(backward) == case.verdict


@pytest.mark.parametrize("state", ["stopped", "traced", "silent", "idle", "dead"])
def test_only_a_running_rank_is_blocked(state: str) -> None:
    reports = on(0, state, operations=(SUM,)) | finished(1)
    assert diagnose(reports).kind is Kind.NOTHING


def test_a_rank_is_blocked_in_the_last_of_its_operations() -> None:
    first = replace(SUM, sequence=4, is_waiting=False)
    reports = on(0, "running", operations=(first, SUM), sequences={"world": 5})
    late = computing(1, 2, 3, world=4)
    assert SUM_TEXT in diagnose(reports | late).sentence
    reports = on(0, "running", operations=(SUM, first), sequences={"world": 5})
    assert diagnose(reports | late).kind is Kind.NOTHING


@pytest.mark.parametrize(
    "other",
    [
        replace(SUM, place="In[3] line 3"),
        replace(SUM, name="barrier"),
        replace(SUM, group="tp"),
        replace(SUM, sequence=6, members=(1, 2, 3)),
    ],
    ids=["place", "name", "group", "sequence"],
)
def test_ranks_in_different_operations_have_a_sentence_each(other: Operation) -> None:
    everywhere = {"world": 6, "tp": 6}
    there = waiting(0, **everywhere) | waiting(1, op=other, **everywhere)
    for_whom = "(for 12 s) for ranks 2-3, which run In[3] line 7."
    assert diagnose(there | computing(2, 3)).sentence == (
        f"rank 0 waits in {SUM_TEXT} {for_whom} "
        f"Rank 1 waits in {describe_operation(other)} {for_whom}"
    )


KEY = Operation(
    STORE_WAIT, "world 0->0", (0, 0), 1, "key 'x'", "In[3] line 2", 12.4, is_waiting=True
)
KEY_TEXT = "rank 0 waits for the key 'x' of the store at In[3] line 2"


def test_a_verdict_says_the_same_without_times() -> None:
    verdicts = [
        diagnose({**waiting(0, op=replace(KEY, seconds=seconds)), **computing(1)})
        for seconds in (12.4, 13.4)
    ]
    assert verdicts[0].sentence != verdicts[1].sentence
    assert {verdict.untimed for verdict in verdicts} == {
        f"{KEY_TEXT}, which no rank has set: rank 1 runs In[3] line 7."
    }


@pytest.mark.parametrize(
    ("others", "does"),
    [
        (computing(1, 2), "ranks 1-2 run In[3] line 7"),
        ({**computing(1), **finished(2)}, "rank 2 finished its part without it; rank 1 runs"),
        ({**failed(1), **computing(2)}, "rank 1 failed (ValueError: x); rank 2 runs"),
        (on(1, "idle"), "rank 1 is idle: nothing runs on it"),
        (on(1, "stopped"), "rank 1 is stopped (SIGSTOP): kill -CONT lets it go on"),
    ],
)
def test_a_key_of_the_store_is_waited_for_while_any_rank_may_set_it(
    others: Reports, does: str
) -> None:
    verdict = diagnose({**waiting(0, op=KEY), **others}, is_sole=True)
    assert verdict.kind is Kind.WAIT
    assert verdict.sentence.startswith(f"{KEY_TEXT} (for 12 s), which no rank has set: {does}")


def test_nobody_can_set_a_key_once_all_others_have_ended_their_part_and_nothing_follows() -> None:
    reports = {**waiting(0, op=KEY), **finished(1, 2)}
    verdict = diagnose(reports, is_sole=True)
    assert verdict.kind is Kind.DEADLOCK
    assert verdict.sentence == (
        "ranks 1-2 did not set the key 'x' of the store at In[3] line 2: they finished their part "
        f"without it; rank 0 waits.{NO_WAIT}"
    )
    assert diagnose(reports).kind is Kind.WAIT  # a later run may set it


def test_a_rank_that_has_ended_its_part_may_still_come_while_a_thread_of_it_goes_on() -> None:
    left = {rank: replace(report, has_threads=True) for rank, report in finished(1).items()}
    for op, does in ((SUM, "finished its part without it"), (KEY, "rank 1 finished its part")):
        verdict = diagnose({**waiting(0, op=op), **left}, is_sole=True)
        assert verdict.kind is Kind.WAIT
        assert does in verdict.sentence
        assert "but has a thread that goes on" in verdict.sentence


def test_a_rank_that_failed_and_was_to_set_a_key_is_the_cause() -> None:
    verdict = diagnose({**waiting(0, op=KEY), **failed(1), **finished(2)})
    assert verdict.kind is Kind.DEADLOCK
    assert verdict.failed


def test_a_wait_for_a_key_that_has_a_limit_of_its_own_is_never_ended() -> None:
    limited = replace(KEY, name=LIMITED_STORE_WAIT)
    verdict = diagnose({**waiting(0, op=limited), **finished(1)}, is_sole=True)
    assert verdict.kind is Kind.WAIT
    assert KEY_TEXT in verdict.sentence


def alone(reports: Reports) -> Reports:
    return {rank: replace(report, has_one_thread=True) for rank, report in reports.items()}


OTHERS_KEY = replace(KEY, group="world 1->1", detail="key 'y'")


def test_ranks_that_wait_for_keys_of_each_other_are_not_ended_while_a_thread_may_set_one() -> None:
    reports = {**alone(waiting(0, op=KEY)), **waiting(1, op=OTHERS_KEY)}
    assert diagnose(reports, is_sole=True).kind is Kind.WAIT


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        (
            waiting(1, 2, op=replace(KEY, group="world 1->1")),
            "ranks 0-2 wait for the key 'x' of the store at In[3] line 2.",
        ),
        (
            waiting(1, op=OTHERS_KEY),
            f"{KEY_TEXT}, rank 1 for the key 'y' of the store at In[3] line 2: each waits for the "
            "other.",
        ),
        (waiting(1), f"{KEY_TEXT}, rank 1 in {SUM_TEXT}: each waits for the other."),
    ],
    ids=["the same key", "keys of each other", "an operation"],
)
def test_nobody_can_set_a_key_where_all_wait_and_have_no_other_thread(
    others: Reports, sentence: str
) -> None:
    reports = alone({**waiting(0, op=KEY), **others})
    verdict = diagnose(reports, is_sole=True)
    assert verdict.kind is Kind.DEADLOCK
    assert verdict.sentence == f"{sentence} No rank is left that could set the key."
    assert diagnose(reports).kind is Kind.WAIT  # a later run may set it


def test_ranks_that_wait_for_the_same_key_are_named_together() -> None:
    reports = {**waiting(0, op=KEY), **waiting(1, op=replace(KEY, group="world 1->1"))}
    same = "ranks 0-1 wait for the key 'x' of the store at In[3] line 2"
    assert diagnose(reports).untimed == f"{same}, which no rank has set."
    reports |= computing(2)
    assert diagnose(reports).untimed == f"{same}, which no rank has set: rank 2 runs In[3] line 7."


def test_a_session_of_one_rank_that_waits_for_a_key_has_a_verdict() -> None:
    assert diagnose(waiting(0, op=KEY), is_sole=True).kind is Kind.NOTHING


def test_a_rank_does_not_miss_itself() -> None:
    reports = waiting(0, op=replace(SUM, members=(0,)))
    reports[0].sequences.clear()
    assert diagnose(reports).kind is Kind.NOTHING


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (SUM, "all_reduce #5 (float32 [4], sum) at In[3] line 2"),
        (replace(SUM, detail="", place=""), "all_reduce #5"),
        (replace(SUM, group="tp", place=""), "all_reduce #5 of tp (float32 [4], sum)"),
        (replace(SUM, group="", detail=""), "all_reduce #5 at In[3] line 2"),
        (replace(RECV_BY_0, group="tp 1->0", detail=""), "recv #1 of tp at In[5] line 2"),
    ],
)
def test_an_operation_in_words(operation: Operation, text: str) -> None:
    assert describe_operation(operation) == text


def test_a_long_reason_is_cut() -> None:
    sentence = diagnose(waiting(0, 2, 3) | failed(1, "ValueError: " + "x" * 500)).sentence
    assert "xxx..." in sentence
    assert len(sentence) < 340


def test_a_message_that_is_on_its_way_is_waited_for() -> None:
    sent = {"world 1->0": 2}
    reports = (
        waiting(0, op=ANY)
        | finished(2)
        | on(1, "idle", outcome=Outcome(Ending.FINISHED), sequences=sent)
    )
    assert diagnose(reports).kind is Kind.NOTHING
    taken = replace(reports[0], sequences={**reports[0].sequences, "world 1->0": 2})
    assert diagnose(reports | {0: taken}).kind is Kind.DEADLOCK


# --- what a device does and nobody sees -----------------------------------------------------------

GRAPH = "a CUDAGraph that was replayed at In[3] line 6"
ENQUEUED = replace(SUM, is_enqueued=True)


def at_device(
    *ranks: int, unseen: tuple[str, ...] = (GRAPH,), operations: tuple[Operation, ...] = ()
) -> Reports:
    """Ranks that wait for their device, and not certainly for an operation that is seen."""
    report = RankReport(
        0,
        "running",
        place="In[3] line 7",
        operations=tuple(replace(op, is_waiting=False) for op in operations),
        sequences={op.group: op.sequence for op in operations},
        is_device_wait=True,
        unseen=unseen,
        is_replaying=GRAPH in unseen,
    )
    return {rank: replace(report, rank=rank) for rank in ranks}


def replaying(rank: int, **sequences: int) -> Reports:
    """A rank that has ended its part, and whose device still works at a graph."""
    (report,) = finished(rank, **sequences).values()
    return {rank: replace(report, unseen=("a replayed graph",), is_replaying=True)}


UNSEEN = [
    nothing(
        "ranks wait for a graph",
        at_device(0, 2) | finished(1) | computing(3),
        f"ranks 0,2 wait for their device at In[3] line 7, for something that is not seen ({GRAPH})"
        "; rank 1 finished its part; rank 3 runs In[3] line 7.",
    ),
    nothing(
        "it may be the graph, or what was issued after it",
        at_device(0, operations=(ENQUEUED,)) | finished(1),
        f"rank 0 waits for its device at In[3] line 7, for {SUM_TEXT} or for something that is not "
        f"seen ({GRAPH}); rank 1 finished its part.",
    ),
    nothing(
        "several things are not seen",
        at_device(0, unseen=("symmetric memory", "torchcomms")) | on(1, "idle"),
        "rank 0 waits for its device at In[3] line 7, for something that is not seen "
        "(symmetric memory or torchcomms); rank 1 is idle.",
    ),
    nothing(
        "nothing is known of what it waits for",
        at_device(0, unseen=()) | computing(1),
        "rank 0 waits for its device at In[3] line 7; rank 1 runs In[3] line 7.",
    ),
    wait(
        "a rank that is missed waits for a graph",
        at_device(1),
        f"waits for its device at In[3] line 7, for something that is not seen ({GRAPH})",
    ),
    Case(
        "a rank that is missed has ended its part, and its device has not",
        waiting(0, op=ENQUEUED) | replaying(1, world=4),
        Kind.WAIT,
        f"rank 0 waits for its device in {SUM_TEXT} (for 12 s) for rank 1, which finished its part "
        "without it, its device not: a replayed graph.",
        (0,),
        (1,),
    ),
    Case(
        "ranks that wait for each other, one of which has replayed a graph",
        waiting(0, op=replace(ON_A, is_enqueued=True))
        | {1: replace(waiting(1, op=ON_B)[1], is_replaying=True)},
        Kind.WAIT,
        f"rank 0 waits for its device in {ON_A_TEXT} (for 9 s) for rank 1, which waits elsewhere. "
        f"Rank 1 waits in {ON_B_TEXT} (for 9 s) for rank 0, which waits elsewhere.",
        (0, 1),
        (0, 1),
    ),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in UNSEEN])
def test_of_what_is_not_seen_nothing_is_certain(case: Case) -> None:
    verdict = diagnose(case.reports)
    assert verdict == replace(case.verdict, untimed=verdict.untimed)
    assert "no rank waits" not in verdict.sentence


def test_a_graph_does_not_begin_an_operation_that_is_met_for() -> None:
    reports = waiting(0, 2, 3) | replaying(1, world=4)
    assert diagnose(reports).kind is Kind.DEADLOCK


def test_a_rank_that_has_died_replays_no_graph() -> None:
    reports = waiting(0, op=ENQUEUED) | dead(1)
    assert diagnose(reports).kind is Kind.DEADLOCK


# --- what devices were given in different orders --------------------------------------------------


def queued(
    rank: int, *operations: Operation, stream: int = 1, in_group_order: bool = False
) -> Reports:
    """A rank that waits for its device, which has these in one stream."""
    given = [
        replace(
            op,
            is_enqueued=True,
            device_stream=stream,
            in_group_order=in_group_order,
            seconds=9.0 - n,
            is_waiting=n == 0,
        )
        for n, op in enumerate(operations)
    ]
    begun = {op.group: op.sequence for op in operations}
    # The one that is waited for comes last.
    return on(rank, "running", operations=(*given[1:], given[0]), sequences=begun)


def cast(root: int) -> Operation:
    return replace(ON_B, name="broadcast", detail=f"float32 [4], root {root}")


def in_order(rank: int, *operations: Operation) -> Reports:
    """A rank that waits for its device, where each group has a stream for all that is its own."""
    return queued(rank, *operations, stream=0, in_group_order=True)


CROSSED = {
    "behind a message that nobody takes": in_order(0, SEND_BY_0, SUM)
    | in_order(1, SUM)
    | in_order(2, SUM)
    | in_order(3, SUM),
    "behind a message that nobody sends": in_order(1, RECV_BY_1, SUM)
    | in_order(0, SUM)
    | in_order(2, SUM)
    | in_order(3, SUM),
    "each sends behind a receive": in_order(0, RECV_BY_0, SEND_BY_0)
    | in_order(1, RECV_BY_1, SEND_BY_1),
    "each has both": queued(0, ON_A, ON_B) | queued(1, ON_B, ON_A),
    "one has not issued the other yet": queued(0, ON_A, ON_B) | queued(1, ON_B),
    "one of them comes from the other's root": queued(0, ON_A, cast(0)) | queued(1, cast(0), ON_A),
    "with others that wait for one of them": queued(0, SUM, ON_A)
    | queued(1, ON_A, SUM)
    | queued(2, SUM)
    | queued(3, SUM),
}
NOT_CROSSED = {
    "in one order": queued(0, ON_A, ON_B) | queued(1, ON_A, ON_B),
    "in two streams": queued(0, ON_A)
    | {1: replace(queued(1, ON_B)[1], operations=queued(1, ON_A, stream=2)[1].operations)},
    "a message that is received": in_order(0, SEND_BY_0, SUM) | in_order(1, RECV_BY_1, SUM),
    "groups that each have a stream": in_order(0, ON_A, ON_B) | in_order(1, ON_B, ON_A),
    "a message beside a group's stream": queued(0, SEND_BY_0, ON_A, stream=0)
    | queued(1, ON_A, stream=0),
    "each sends before a receive": in_order(0, SEND_BY_0, RECV_BY_0)
    | in_order(1, SEND_BY_1, RECV_BY_1),
    "in streams that are not known": queued(0, ON_A, ON_B, stream=0)
    | queued(1, ON_B, ON_A, stream=0),
    "a root that need not wait": queued(0, ON_A, cast(1)) | queued(1, cast(1), ON_A),
}


@pytest.mark.parametrize("reports", CROSSED.values(), ids=CROSSED)
def test_devices_that_have_two_groups_operations_in_different_orders_wait_for_ever(
    reports: Reports,
) -> None:
    verdict = diagnose(reports)
    assert verdict.kind is Kind.ORDER
    assert verdict.reason is AbortReason.MISMATCH
    assert set(verdict.waiting) == set(reports)


def test_of_devices_that_wait_for_each_other_both_operations_and_lines_are_named() -> None:
    assert diagnose(CROSSED["each has both"]).sentence == (
        f"rank 0 waits for its device in {ON_A_TEXT}, rank 1 in {ON_B_TEXT}: "
        f"each waits for the other. {OTHER_ORDER}"
    )


@pytest.mark.parametrize("reports", NOT_CROSSED.values(), ids=NOT_CROSSED)
def test_devices_that_may_go_on_are_left_alone(reports: Reports) -> None:
    assert diagnose(reports).kind in (Kind.NOTHING, Kind.WAIT)


def test_devices_that_may_wait_for_each_other_are_named_and_left_alone() -> None:
    verdict = diagnose(NOT_CROSSED["in streams that are not known"])
    assert verdict.kind is Kind.NOTHING
    assert verdict.is_crossed
    assert verdict.lines[0] == (
        f"rank 0 has given its device {ON_A_TEXT} before {ON_B_TEXT}, rank 1 the other way round: "
        "the devices may be waiting for each other."
    )
    assert verdict.lines[1].startswith("No rank waits for a missing one: ")


FIRST_A, NEXT_A = ON_A, replace(ON_A, sequence=ON_A.sequence + 1)
NOT_EVEN_PERHAPS = {
    "in one order": queued(0, ON_A, ON_B, stream=0) | queued(1, ON_A, ON_B, stream=0),
    "of one group": queued(0, FIRST_A, NEXT_A, stream=0) | queued(1, FIRST_A, NEXT_A, stream=0),
    "one is over": queued(0, ON_A, ON_B, stream=0) | queued(1, ON_B, stream=0),
}


@pytest.mark.parametrize("reports", NOT_EVEN_PERHAPS.values(), ids=NOT_EVEN_PERHAPS)
def test_of_devices_that_go_on_nothing_is_said(reports: Reports) -> None:
    assert not diagnose(reports).is_crossed


@st.composite
def programs(draw: st.DrawFn) -> dict[int, list[Operation]]:
    """What the devices of some ranks are given, in any orders of the groups."""
    groups = {"a": (0, 1), "b": (0, 1), "c": (0, 1, 2), "d": (1, 2)}
    order = draw(st.lists(st.sampled_from(sorted(groups)), min_size=1, max_size=5))
    made = [
        Operation("all_reduce", name, groups[name], order[: n + 1].count(name))
        for n, name in enumerate(order)
    ]
    found = {}
    for rank in range(3):
        own = [op for op in made if rank in op.members]
        shuffled = draw(st.permutations([op.group for op in own]))
        numbered = [(name, shuffled[: n + 1].count(name)) for n, name in enumerate(shuffled)]
        found[rank] = [next(o for o in own if (o.group, o.sequence) == key) for key in numbered]
    return found


@given(programs())
def test_devices_are_said_to_wait_for_ever_when_they_do_and_never_when_they_come_through(
    left: dict[int, list[Operation]],
) -> None:
    verdicts = []
    while True:
        reports: Reports = {}
        for rank, operations in left.items():
            # Those that are complete are still counted.
            one = queued(rank, *operations) if operations else finished(rank)
            counts = dict.fromkeys("abcd", 9)
            reports |= {rank: replace(one[rank], sequences=counts)}
        verdicts.append(diagnose(reports).kind)
        ready = {
            (op.group, op.sequence)
            for op in (operations[0] for operations in left.values() if operations)
            if all(left[m] and left[m][0] == op for m in op.members)
        }
        if not ready:
            break
        left = {
            r: [o for o in ops if (o.group, o.sequence) not in ready] for r, ops in left.items()
        }
    if any(left.values()):
        assert verdicts[-1] is Kind.ORDER
    else:
        assert set(verdicts) <= {Kind.NOTHING, Kind.WAIT}


# --- whatever is reported -------------------------------------------------------------------------

RANKS = range(5)
GROUPS = ["world", "tp", "world 0->1"]


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    return Operation(
        draw(st.sampled_from(["all_reduce", "barrier", "recv"])),
        draw(st.sampled_from(GROUPS)),
        tuple(draw(st.lists(st.integers(0, 7), max_size=5))),
        draw(st.integers(-1, 3)),
        draw(st.sampled_from(["", "float32 [4], sum"])),
        draw(st.sampled_from(["", "In[3] line 2"])),
        draw(st.sampled_from([0.0, 0.4, 12.0, -1.0, math.inf, math.nan])),
        draw(st.booleans()),
    )


@st.composite
def any_report(draw: st.DrawFn, rank: int) -> RankReport:
    states = [*RankState, RankState.RUNNING]
    outcomes = [
        None,
        NO_PART,
        Outcome(Ending.FINISHED),
        failure("ValueError: x"),
        Outcome(Ending.FAILED),
        Outcome(Ending.FAILED, "\n"),
    ]
    return RankReport(
        rank,
        draw(st.sampled_from(states)),
        place=draw(st.sampled_from(["", "In[3] line 7"])),
        outcome=draw(st.sampled_from(outcomes)),
        operations=tuple(draw(st.lists(operations(), max_size=2))),
        sequences=draw(st.dictionaries(st.sampled_from(GROUPS), st.integers(0, 3))),
    )


@st.composite
def any_reports(draw: st.DrawFn) -> Reports:
    ranks = draw(st.lists(st.sampled_from(RANKS), unique=True))
    return {rank: draw(any_report(rank)) for rank in ranks}


def blocked(reports: Mapping[int, RankReport]) -> dict[int, Operation]:
    return {
        rank: report.operations[-1]
        for rank, report in reports.items()
        if report.state == "running" and report.operations and report.operations[-1].is_waiting
    }


def ended(report: RankReport) -> bool:
    return report.state == "dead" or (report.state == "idle" and report.outcome is not None)


@given(any_reports())
def test_every_report_has_a_verdict(reports: Reports) -> None:
    verdict = diagnose(reports)
    assert set(verdict.waiting) <= set(blocked(reports))
    assert set(verdict.missing) <= set(reports)
    assert list(verdict.waiting) == sorted(set(verdict.waiting))
    assert list(verdict.missing) == sorted(set(verdict.missing))
    assert bool(verdict.waiting) == bool(verdict.missing) == (verdict.kind is not Kind.NOTHING)
    assert verdict.sentence.endswith(".")
    assert "\n" not in verdict.sentence
    if verdict.kind is Kind.NOTHING:
        return
    members = {m for rank in verdict.waiting for m in blocked(reports)[rank].members}
    assert set(verdict.missing) <= members


@given(any_reports())
def test_what_explains_a_wait_is_among_the_missing(reports: Reports) -> None:
    verdict = diagnose(reports)
    gone = {rank for rank in verdict.missing if ended(reports[rank])}
    assert bool(gone) == (verdict.kind is Kind.DEADLOCK)
    assert verdict.failed == any(
        reports[rank].state == "dead" or is_failure(reports[rank]) for rank in gone
    )
    if verdict.kind is Kind.ORDER:
        assert set(verdict.missing) & set(verdict.waiting)


@given(any_reports())
def test_without_an_ended_rank_a_deadlock_is_gone(reports: Reports) -> None:
    """One that computes in the place of each that has ended may still come."""
    computes = {
        rank: RankReport(rank, "running", sequences=report.sequences) if ended(report) else report
        for rank, report in reports.items()
    }
    before, after = diagnose(reports), diagnose(computes)
    assert after.kind is not Kind.DEADLOCK
    assert not after.failed
    if before.kind is Kind.ORDER:
        assert (after.kind, after.waiting, after.missing) == (
            Kind.ORDER,
            before.waiting,
            before.missing,
        )


@given(st.sets(st.integers(1, 3), min_size=1), st.data())
def test_one_who_computes_in_place_of_the_ended_makes_it_a_wait(
    late: set[int], data: st.DataObject
) -> None:
    there = waiting(*sorted({0, 1, 2, 3} - late))
    end = st.sampled_from([finished, failed, dead])
    gone: Reports = {}
    for rank in sorted(late):
        gone |= data.draw(end)(rank)
    facts = tuple(sorted(there)), tuple(sorted(late))
    before, after = diagnose(there | gone), diagnose(there | computing(*sorted(late)))
    assert (before.kind, before.waiting, before.missing) == (Kind.DEADLOCK, *facts)
    assert (after.kind, after.waiting, after.missing) == (Kind.WAIT, *facts)
    assert not after.failed


@given(any_reports(), st.randoms(use_true_random=False))
def test_the_order_of_any_reports_is_nothing(reports: Reports, random: Any) -> None:
    ranks = list(reports)
    random.shuffle(ranks)
    assert diagnose({rank: reports[rank] for rank in ranks}) == diagnose(reports)


@given(any_reports(), st.permutations(RANKS))
def test_the_numbers_of_the_ranks_are_only_names(reports: Reports, names: list[int]) -> None:
    """Give every rank another number: the verdict is the same, of those numbers."""

    def renamed(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names[rank] if rank in RANKS else rank for rank in ranks)

    other = {
        names[rank]: replace(
            report,
            rank=names[rank],
            operations=tuple(replace(o, members=renamed(o.members)) for o in report.operations),
        )
        for rank, report in reports.items()
    }
    verdict, again = diagnose(reports), diagnose(other)
    assert (again.kind, again.failed) == (verdict.kind, verdict.failed)
    assert again.waiting == tuple(sorted(renamed(verdict.waiting)))
    assert again.missing == tuple(sorted(renamed(verdict.missing)))


def test_a_rank_that_failed_by_a_mismatch_is_told_as_one() -> None:
    reports = waiting(0) | failed(1, "CollectiveMismatchError: x")
    assert diagnose(reports).reason is AbortReason.MISMATCH


def test_whom_many_ranks_miss_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    before = diagnosis._takes_part

    def takes_part(report: RankReport, operation: Operation) -> bool:
        looked.append(report.rank)
        return before(report, operation)

    monkeypatch.setattr(diagnosis, "_takes_part", takes_part)
    many = 256
    operations = [replace(SUM, members=tuple(range(many))) for _ in range(many)]
    reports = computing(many - 1)
    for rank in range(many - 1):
        reports |= waiting(rank, op=operations[rank])
    verdict = diagnose(reports)
    assert (verdict.kind, verdict.missing) == (Kind.WAIT, (many - 1,))
    assert sorted(looked) == list(range(many))
