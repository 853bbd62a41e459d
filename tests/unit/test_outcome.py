"""From what ranks answered to one error, the cause first."""

from __future__ import annotations

import traceback
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.cluster.deaths import restart_text
from distsession.display.colors import Colors
from distsession.errors import CollectiveError, EngineDiedError
from distsession.kernel import outcome
from distsession.kernel.failures import (
    Failure,
    Failures,
    own_causes,
    with_handled,
    with_mismatch,
)
from distsession.kernel.outcome import reconnected_text, run_error
from distsession.protocol.messages import (
    Aborted,
    Called,
    ErrorInfo,
    FrameInfo,
    Mismatch,
    Operation,
    Reason,
    TimedOut,
)
from distsession.ranks import DeviceInfo, RankInfo
from distsession.results import RankResults

NONE: RankResults[None] = RankResults({}, duration=0.0, durations={})
SUM = "float32 [4], sum"


def barrier(line: int, *, waits: bool = True) -> Operation:
    return Operation("barrier", "world", (0, 1, 2, 3), 1, "", f"In[7] line {line}", 0.0, waits)


def own(text: str = "boom", at: float = 0.0, kind: type[Exception] = ValueError) -> Failure:
    frames = (FrameInfo("In[7]", 2, "<module>"),)
    return Failure(kind(text), ErrorInfo(kind.__name__, text, frames), at=at)


def suffered(line: int = 5, *, waits: bool = True, had_own: bool = False) -> Failure:
    reason = Aborted(barrier(line, waits=waits))
    text = "rank 0 waits in barrier for rank 3, which failed"
    before = (own().info, own().error) if had_own else None
    info = ErrorInfo("CollectiveError", text)
    return Failure(CollectiveError(text), info, reason, own=before)


def died(at: float = 0.0) -> Failure:
    death = EngineDiedError("rank 9 (pid 1) was killed.", rank=9, pid=1, returncode=-9)
    return Failure(death, ErrorInfo("EngineDiedError", str(death)), at=at)


def because(reason: Reason, ename: str) -> Failure:
    return Failure(CollectiveError("seen"), ErrorInfo(ename, "seen"), reason)


def order(failed: Failures) -> list[int]:
    return list(run_error(failed, NONE, []).by_rank)


def shown(failed: Failures, **more: object) -> list[str]:
    then = reconnected_text("")
    return run_error(failed, NONE, [], then=then, **more)._render_traceback_()  # type: ignore[arg-type]


def test_those_that_only_suffered_are_last_whatever_their_rank() -> None:
    assert order({0: suffered(), 1: suffered(waits=False), 3: own(at=9.0)}) == [3, 0, 1]


def test_of_those_that_failed_at_about_the_same_time_a_death_is_first() -> None:
    assert order({0: own(), 2: died(at=0.3), 1: suffered()}) == [2, 0, 1]


def test_what_failed_long_before_comes_before_a_death() -> None:
    assert order({0: died(at=5.0), 2: own()}) == [2, 0]


def test_the_same_error_of_all_ranks_is_that_of_the_lowest() -> None:
    failed = {0: own(at=3.0), 1: own(), 2: own(at=2.0)}
    assert order(failed) == [0, 1, 2]
    assert shown(failed)[0] == "ValueError on ranks 0-2 at In[7] line 2: boom"


def test_the_ranks_that_suffered_have_one_line() -> None:
    failed = {0: suffered(), 1: suffered(), 2: suffered(waits=False), 3: own("no disk.")}
    lines = shown(failed)
    assert lines[0] == "ValueError on rank 3 at In[7] line 2: no disk."
    assert lines[-2:] == [
        "Ranks 0-1 waited in barrier #1 at In[7] line 5 and were freed; rank 2 came to it later.",
        "The process group is connected anew, and all variables are kept.",
    ]
    assert ".." not in str(run_error(failed, NONE, []))


def test_many_operations_are_not_all_listed() -> None:
    failed = {rank: suffered(rank) for rank in range(20)} | {20: own()}
    assert shown(failed)[-2] == (
        "Rank 0 waited in barrier #1 at In[7] line 0 and was freed; rank 1 waited in barrier #1 "
        "at In[7] line 1 and was freed; ranks 2-19 waited in others and were freed."
    )


def test_where_all_suffered_they_say_from_what() -> None:
    lines = shown({0: suffered(), 1: suffered()})
    assert lines[0] == "CollectiveError: rank 0 waits in barrier for rank 3, which failed"


def test_one_with_an_error_before_leads_where_nobody_else_does() -> None:
    assert order({0: suffered(), 1: suffered(had_own=True)}) == [1, 0]
    assert order({0: suffered(had_own=True), 1: own(at=9.0)}) == [1, 0]


def test_a_rank_that_was_seen_waiting_may_only_have_suffered() -> None:
    failed = {0: own("cleaning up", at=1.0), 1: own(at=2.0)}
    error = run_error(failed, NONE, [], {0: "barrier #1"})
    assert list(error.by_rank) == [1, 0]
    assert own_causes(failed, {0: "barrier #1"}) == [1]


def test_one_that_is_told_of_anothers_failure_does_not_lead() -> None:
    told = ErrorInfo("CollectiveError", "rank 1 raised in one_rank_first: boom")
    failed = {0: Failure(CollectiveError(told.evalue), told), 1: own()}
    assert order(failed) == [1, 0]
    assert (
        shown(failed)[-1] == "Rank 0 raised CollectiveError: rank 1 raised in one_rank_first: boom."
    )


def test_a_mismatch_is_told_once_with_what_each_rank_has_seen() -> None:
    posts = [Called(r, "all_reduce", SUM if r == 2 else "int32 [4], sum", "In[7] line 3")
             for r in range(4)]  # fmt: skip
    seen = {0: (0, 2), 1: (1, 2), 2: (0, 1, 2), 3: (2, 3)}
    failed = {
        rank: because(
            Mismatch("world", 1, tuple(posts[n] for n in part)), "CollectiveMismatchError"
        )
        for rank, part in seen.items()
    }
    error = run_error(failed, NONE, [])
    line = (
        "CollectiveMismatchError: rank 2 called all_reduce with float32 [4], ranks 0-1,3 with "
        "int32 [4], at In[7] line 3"
    )
    assert str(error) == line
    lines = error._render_traceback_()
    assert lines[0] == f"{line}."
    assert lines[1].endswith("Make the calls agree.")
    assert "seen" not in "\n".join(lines)


def test_who_was_freed_before_it_was_known_what_it_called_has_part_in_a_mismatch() -> None:
    calls = tuple(
        Called(r, "all_reduce" if r == 0 else "barrier", "", "In[7] line 3") for r in range(3)
    )
    raised = because(Mismatch("world", 1, calls[:2]), "CollectiveMismatchError")
    failed = {0: raised, 1: raised, 2: suffered(), 3: suffered()}
    told = with_mismatch(failed, Mismatch("world", 1, calls))
    assert told[0] is raised
    assert told[2].reason == Mismatch("world", 1, calls)
    assert told[3] is failed[3]  # nobody has seen what it called
    assert str(run_error(told, NONE, [])) == (
        "CollectiveMismatchError: rank 0 called all_reduce, ranks 1-2 called barrier, at In[7] "
        "line 3. Rank 3 waited in barrier #1 at In[7] line 5 and was freed."
    )


def test_who_was_freed_from_another_operation_has_no_part_in_a_mismatch() -> None:
    calls = (Called(0, "all_reduce", ""), Called(2, "barrier", ""))
    for other in (Mismatch("world", 2, calls), Mismatch("pair", 1, calls)):
        failed = {0: because(other, "CollectiveMismatchError"), 2: suffered(), 3: own()}
        assert with_mismatch(failed, other) == failed


def test_a_time_limit_says_who_was_late_and_where() -> None:
    late = because(TimedOut(barrier(5), (2,), 3.0), "CollectiveHangError")
    failed = {0: late, 1: late, 3: late, 2: suffered(waits=False)}
    assert shown(failed, places={2: "In[7] line 3"})[0] == (
        "CollectiveHangError: rank 2 did not come to barrier within 3 s, in which ranks 0-1,3 "
        "waited at In[7] line 5; rank 2 was at In[7] line 3."
    )


def test_what_prevents_the_group_ends_with_one_full_stop() -> None:
    assert reconnected_text("it was stopped.").endswith("it was stopped.")
    assert reconnected_text("it was stopped").endswith("it was stopped.")


failures = st.one_of(
    st.builds(own, st.sampled_from(["a", "b"]), st.floats(0, 10)),
    st.builds(died, st.floats(0, 10)),
    st.builds(suffered, st.integers(1, 3), waits=st.booleans(), had_own=st.booleans()),
)


@given(st.dictionaries(st.integers(0, 40), failures, min_size=1))
def test_nobody_is_lost_and_no_sufferer_leads(failed: Failures) -> None:
    error = run_error(failed, NONE, [])
    assert set(error.by_rank) == set(failed)
    causes = own_causes(failed, {})
    assert set(list(error.by_rank)[: len(causes)]) == set(causes)
    if causes:
        lines = error._render_traceback_()
        assert "CollectiveError" not in "\n".join(lines)
        told = [line for line in lines if "waited in" in line or "came to" in line]
        assert len(told) == int(len(causes) < len(failed))


# --- the same error with other numbers ------------------------------------------------------------


def test_errors_that_differ_in_a_number_are_one_and_what_differs_is_listed() -> None:
    failed = {rank: own(f"tried {rank} GiB of 9") for rank in range(12)}
    lines = shown(failed)
    assert lines[0].startswith("ValueError on ranks 0-11")
    assert lines[0].endswith(": tried 0 GiB of 9 (on rank 0; others differ)")
    assert "ValueError: tried <a> GiB of 9" in lines
    assert lines[-12:] == [f"  rank {rank}: <a> {rank}" for rank in range(12)]
    assert len(lines) < 20
    assert list(run_error(failed, NONE, []).by_rank) == list(range(12))


def test_of_many_that_differ_some_are_listed() -> None:
    lines = shown({rank: own(f"number {rank}") for rank in range(40)})
    assert lines[-1] == "  and 24 more ranks: .by_rank of the error has them"
    assert len(lines) < 25


def test_errors_of_another_place_class_or_history_stay_apart() -> None:
    frame = FrameInfo("In[7]", 3, "<module>")
    for other in (
        Failure(ValueError("1"), ErrorInfo("ValueError", "1", (frame,))),
        own("1", kind=KeyError),
        Failure(
            ValueError("1"), replace(own("1").info, cause=ErrorInfo("KeyError", "2", (frame,)))
        ),
    ):
        text = "\n".join(shown({0: own("0"), 1: other}))
        assert "on rank 0" in text
        assert "on rank 1" in text
        assert "<a>" not in text


def test_what_came_before_may_differ_too() -> None:
    def caused(number: int) -> Failure:
        before = ErrorInfo("KeyError", f"{number}", own().info.frames)
        return Failure(ValueError("no"), replace(own("no").info, cause=before))

    lines = shown({0: caused(4), 1: caused(5), 2: caused(5)})
    assert "KeyError: <a>" in lines
    assert lines[-2:] == ["  rank 0: <a> 4", "  ranks 1-2: <a> 5"]


def test_colours_are_those_of_the_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    colors = Colors(lambda t: f"N({t})", lambda t: f"P({t})", lambda t: f"S({t})")
    monkeypatch.setattr(outcome, "error_colors", lambda: colors)
    frames = (FrameInfo("In[7]", 1, "<module>", ((1, "1 / 0"),)),)
    error = run_error({0: Failure(ValueError(), ErrorInfo("ValueError", "", frames))}, NONE, [])
    assert str(error) == "ValueError on rank 0 at In[7] line 1"
    assert error._render_traceback_() == [
        "N(ValueError) on rank 0 at In[7] line 1",
        "",
        "Cell P(In[7], line 1)",
        "P(---->   1) S(1 / 0)",
        "",
        "N(ValueError)",
    ]


def killed(rank: int, how: str = "was killed by SIGKILL", details: str = "") -> Failure:
    death = EngineDiedError(
        f"rank {rank} (pid 1) {how}.",
        rank=rank,
        pid=1,
        returncode=-9,
        how=how,
        remedy=restart_text([rank]),
        details=details,
    )
    return Failure(death, ErrorInfo("EngineDiedError", str(death)))


def rank_info(rank: int) -> RankInfo:
    device = DeviceInfo("cpu", "a processor")
    return RankInfo(rank, rank, 4, 4, 0, 1, "alpha", 100 + rank, "gloo", device)


def of_deaths(failed: Failures, world: int) -> str:
    infos = [rank_info(rank) for rank in range(world)]
    return "\n".join(run_error(failed, NONE, infos)._render_traceback_())


def test_what_to_do_about_several_deaths_comes_once_and_names_all_of_them() -> None:
    text = of_deaths({0: killed(0), 2: killed(2)}, 4)
    assert text == (
        "EngineDiedError: ranks 0,2: each was killed by SIGKILL. session.restart([0, 2]) replaces "
        "them; restore=[...] copies variables from a rank that stays."
    )
    text = of_deaths({0: killed(0), 1: killed(1, "ended with exit code 3")}, 4)
    assert text.count("restart(") == 1
    assert "session.restart([0, 1]) replaces them" in text.splitlines()[0]
    assert text.splitlines()[2] == "EngineDiedError: rank 1 (pid 1) ended with exit code 3."


@pytest.mark.parametrize("world", [1, 2])
def test_where_no_rank_stays_nothing_is_copied_from_one(world: int) -> None:
    failed = {rank: killed(rank, details="\nIts last lines:\noh") for rank in range(world)}
    text = of_deaths(failed, world)
    assert "session.restart() replaces all ranks, without their variables." in text
    assert "restore=" not in text
    assert text.count("Its last lines:") == 1
    text = of_deaths({0: killed(0)}, 2)
    assert "session.restart([0]) replaces it; restore=[...] copies variables" in text


def test_what_a_script_shows_has_the_ranks_traceback() -> None:
    frame = FrameInfo("/home/me/train.py", 2, "step", ((2, "boom()"),))
    failed = {0: Failure(ValueError("no"), ErrorInfo("ValueError", "no", (frame,)))}
    error = run_error(failed, NONE, [])
    shown = traceback.format_exception(error)[-1]
    assert "".join(traceback.format_exception(error)).endswith(
        "distsession.errors.RunError: ValueError on rank 0 at train.py line 2: no\n"
        "\n/home/me/train.py, line 2, in step\n    boom()\nValueError: no\n"
    ), shown
    error.add_note("and more")
    lines = error._render_traceback_()
    assert lines.count("ValueError: no") == 1  # it has it already
    assert lines[-1] == "and more"


# --- what ranks were handling ---------------------------------------------------------------------


CALLS = (Called(0, "all_reduce"), Called(1, "all_reduce"), Called(2, "barrier"))
UNLIKE = Mismatch("world", 1, CALLS)


def handling(reason: Reason, ename: str = "CollectiveMismatchError") -> Failure:
    before = own()
    return Failure(
        CollectiveError("seen"), ErrorInfo(ename, "seen"), reason, own=(before.info, before.error)
    )


def test_what_one_rank_was_handling_is_the_cause_of_a_mismatch() -> None:
    failed = {
        0: because(UNLIKE, "CollectiveMismatchError"),
        1: because(UNLIKE, "CollectiveMismatchError"),
        2: handling(UNLIKE),
    }
    error = run_error(with_handled(failed, {}, 3), NONE, [])
    assert list(error.by_rank) == [2, 0, 1]
    assert str(error).startswith("ValueError on rank 2 at In[7] line 2: boom. While rank 2 handled")
    assert "rank 2 called barrier, ranks 0-1 called all_reduce" in str(error)


def test_a_rank_that_was_freed_before_it_saw_the_mismatch_is_its_cause_all_the_same() -> None:
    failed = {
        0: because(UNLIKE, "CollectiveMismatchError"),
        1: because(UNLIKE, "CollectiveMismatchError"),
        2: handling(Aborted(barrier(5))),
    }
    error = run_error(with_handled(failed, {}, 3), NONE, [])
    assert list(error.by_rank) == [2, 0, 1]
    assert str(error).startswith("ValueError on rank 2 at In[7] line 2: boom. While rank 2 handled")


def test_what_all_ranks_were_handling_explains_no_mismatch() -> None:
    failed = {rank: handling(UNLIKE) for rank in range(3)}
    assert with_handled(failed, {}, 3) == failed


def test_what_a_rank_was_handling_is_no_cause_beside_a_failure_of_another() -> None:
    failed = {0: own("first"), 2: handling(Aborted(barrier(5)))}
    assert with_handled(failed, {}, 3) == failed


def test_what_most_ranks_were_handling_explains_no_wait_in_vain() -> None:
    failed = {rank: handling(Aborted(barrier(5))) for rank in range(3)}
    assert with_handled(failed, {}, 4) == failed
    alone = with_handled({0: failed[0]}, {}, 4)
    assert type(alone[0].error) is ValueError
