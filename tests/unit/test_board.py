"""The board over long histories: nothing is taken for what was there before."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distsession.engine.collectives.recorder import MAX_TAGS, Recorder, Stream
from distsession.errors import CollectiveMismatchError
from distsession.protocol import board as layout
from distsession.protocol.board import Board, Region, file_size, make_file
from distsession.protocol.diagnosis import Kind, diagnose
from distsession.protocol.messages import RankReport
from distsession.protocol.rank_state import Ending, Outcome, RankState

RANKS = 3
WORLD = list(range(RANKS))
F32 = torch.float32


@pytest.fixture
def board() -> Iterator[Board]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(RANKS))
    board = Board(descriptor, RANKS)
    yield board
    board.close()
    os.close(descriptor)


def post(stream: Stream, key: tuple[Any, ...]) -> int:
    """Post as a group does, whose own two frames are not looked at for the place."""

    def method() -> int:
        def collective() -> int:
            return stream.post(key)

        return collective()

    return method()


class Rank:
    """One rank of the board, played in this process."""

    def __init__(self, board: Board, rank: int):
        self.rank = rank
        self.recorder = Recorder(board, rank)
        self.recorder.reset()

    def stream(self, name: str = "world", number: int = 0, tag: int = 0) -> Stream:
        members = WORLD
        if "->" in name:
            members = [int(end) for end in name.split()[1].split("->")]
        return self.recorder.stream((0, number), name, members, tag=tag)

    def do(self, *key: Any, name: str = "world", number: int = 0, tag: int = 0) -> None:
        """Post an operation, find all that the peers have posted alike, and end it."""
        stream = self.stream(name, number, tag)
        at = post(stream, key)
        stream.compare(at)
        stream.end(at)

    def block(self, *key: Any, name: str = "world", number: int = 0) -> None:
        at = post(self.stream(name, number), key)
        self.recorder.block(at)

    def drop(self, name: str, number: int = 0) -> None:
        self.recorder.drop_streams(self.recorder.epoch, [self.stream(name, number).key])

    def report(self, outcome: Outcome | None = None) -> RankReport:
        region = self.recorder.region
        state = RankState.IDLE if outcome else RankState.RUNNING
        operations = () if outcome else region.operations()
        sequences = region.sequences()
        return RankReport(
            self.rank, state, outcome=outcome, operations=operations, sequences=sequences
        )


@pytest.fixture
def ranks(board: Board) -> list[Rank]:
    return [Rank(board, rank) for rank in WORLD]


def shape(number: int) -> tuple[Any, ...]:
    return "all_reduce", F32, torch.Size([number]), "sum"


def age(ranks: list[Rank], operations: int = 100_000, groups: int = 1000) -> None:
    """All ranks do the same for a long time, one after the other."""
    for number in range(operations):
        for rank in ranks:
            rank.do(*shape(number % 10_000))
    for number in range(groups):
        name = f"group {number} (ranks 0-{RANKS - 1})"
        for rank in ranks:
            rank.do("new_group", name=name)
            rank.do(*shape(number), name=name)
        for rank in ranks:
            rank.drop(name)


# --- texts ----------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(max_size=3000), min_size=1, max_size=30), st.integers(1, 2**32))
def test_a_text_reads_as_it_was_written_or_as_overwritten(texts: list[str], seed: int) -> None:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(1))
    board = Board(descriptor, 1)
    region, chance = board.regions[0], random.Random(seed)
    written: dict[int, str] = {}
    for _ in range(2500):
        text = chance.choice(texts)
        written[region.add_text(text)] = text
    end = region.text_end
    for number, text in written.items():
        found = region.text(number)
        assert found in (None, text)
        if end - number < layout.TEXT_WORDS - layout.LONGEST_TEXT:
            assert found == text
        if end - number > layout.TEXT_WORDS:
            assert found is None
    board.close()
    os.close(descriptor)


def test_a_text_that_is_too_long_is_cut_and_says_so(board: Board) -> None:
    region = board.regions[0]
    text = region.text(region.add_text("é" * layout.LONGEST_TEXT))
    assert text is not None
    assert text.endswith("...")
    assert len(text.encode()) <= layout.LONGEST_TEXT


def test_names_that_are_too_long_stay_different(board: Board) -> None:
    region = board.regions[0]
    long = "group 1 (ranks " + ",".join(map(str, range(0, 200, 2))) + ")"
    for number, end in enumerate(("0->1", "0->1 tag 5"), 1):
        region.add_stream(number, f"{long} {end}", [0, 1])
    first, second = region.sequences()
    assert first != second


def test_more_ranks_than_a_head_can_name_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1024"):
        Board(-1, layout.MAX_RANKS + 1)


# --- what lives -----------------------------------------------------------------------------------


def test_groups_keep_their_names_and_members_over_any_number_of_shapes(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.do("barrier")
    for number in range(30_000):
        ranks[0].do("all_gather", F32, torch.Size([number, 7, 7, 7, 7]))
    (name,) = ranks[0].recorder.region.sequences()
    assert name == "world"
    ranks[0].block("barrier")
    (operation,) = ranks[0].recorder.region.operations()
    assert operation.members == tuple(WORLD)
    assert operation.name == "barrier"


def test_what_is_under_way_keeps_its_text_over_any_number_of_shapes(ranks: list[Rank]) -> None:
    rank = ranks[0]
    rank.block("all_reduce", F32, torch.Size([12345]), "sum", name="group 7 (ranks 0-2)")
    for number in range(90_000):
        rank.do("all_gather", F32, torch.Size([number, 7, 7, 7, 7, 7, 7]))
    assert rank.recorder.region.text_end > 2 * layout.TEXT_WORDS  # the ring has come round twice
    (operation,) = rank.recorder.region.operations()
    assert operation.detail == "float32 [12345], sum"
    assert operation.place.startswith("test_board.py line ")


DONE = Outcome(Ending.FINISHED)
HANGS = {
    "a rank failed": ({2: Outcome(Ending.FAILED, "late", "ValueError")}, Kind.DEADLOCK, True),
    "a rank finished": ({2: DONE}, Kind.DEADLOCK, False),
    "all others finished": ({1: DONE, 2: DONE}, Kind.DEADLOCK, False),
    "a rank computes": ({}, Kind.WAIT, False),
}


@pytest.fixture(scope="module")
def old() -> Iterator[list[Rank]]:
    """Ranks that have been through 10^5 operations with 10^4 shapes, and 10^3 groups."""
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(RANKS))
    board = Board(descriptor, RANKS)
    ranks = [Rank(board, rank) for rank in WORLD]
    age(ranks)
    yield ranks
    board.close()
    os.close(descriptor)


@pytest.mark.parametrize(("outcomes", "kind", "failed"), HANGS.values(), ids=HANGS)
def test_in_an_old_session_it_is_known_who_waits_for_whom(
    old: list[Rank], outcomes: dict[int, Outcome], kind: Kind, failed: bool
) -> None:
    waiting = [rank for rank in old if rank.rank not in outcomes and rank.rank != 2]
    for rank in waiting:
        rank.block("barrier")
    reports = {rank.rank: rank.report(outcomes.get(rank.rank)) for rank in old}
    verdict = diagnose(reports)
    for rank in waiting:
        rank.stream().withdraw(rank.recorder.words[rank.recorder.blocked])
        rank.recorder.block(0)
    assert verdict.kind is kind
    assert verdict.failed == failed
    assert verdict.waiting == tuple(rank.rank for rank in waiting)
    assert 2 in verdict.missing
    assert "barrier #100001 at test_board.py line" in verdict.sentence


def test_in_an_old_session_a_mismatch_is_seen_with_its_sides(old: list[Rank]) -> None:
    at = {rank.rank: rank.stream().post(shape(3 + (rank.rank == 1))) for rank in old}
    with pytest.raises(CollectiveMismatchError) as caught:
        old[1].stream().meet(at[1], 1.0)
    assert "[3]" in str(caught.value)
    assert "[4]" in str(caught.value)
    for rank in old:
        rank.stream().withdraw(at[rank.rank])


def test_room_of_groups_that_are_gone_is_used_again(old: list[Rank]) -> None:
    for rank in old:
        assert rank.recorder.words[rank.recorder.region.start + layout.STREAM_COUNT] < 20


# --- what is used again ---------------------------------------------------------------------------


def test_a_group_stays_to_be_seen_until_all_peers_have_passed(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.do("new_group", name="group 1")
    at = {rank.rank: rank.stream("group 1").post(("broadcast", F32)) for rank in ranks}
    ranks[0].stream("group 1").end(at[0])  # its root may be done before the others look
    ranks[0].drop("group 1")
    for number in range(2, 50):
        for rank in ranks:
            rank.do("new_group", name=f"group {number}")
            rank.do("barrier", name=f"group {number}")
        for rank in ranks:
            rank.drop(f"group {number}")
    ranks[1].stream("group 1").meet(at[1], 0.0)
    ranks[2].stream("group 1").meet(at[2], 0.0)


def test_a_group_made_again_under_a_name_is_not_the_old_one(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.do("barrier", name="group x", number=0)
        rank.drop("group x", 0)
    at = ranks[0].stream("group x", 1).post(("broadcast", F32))
    with pytest.raises(Exception, match="did not come"):
        ranks[0].stream("group x", 1).meet(at, 0.0)
    assert ranks[0].recorder.region.sequences()["group x"] == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_any_interleaving_of_a_right_program_passes(seed: int) -> None:
    """Ranks run the same program at their own pace; none passes too early, none is kept."""
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(RANKS))
    board = Board(descriptor, RANKS)
    chance = random.Random(seed)
    program: list[tuple[str, str, int]] = []
    alive: list[str] = []
    for number in range(120):
        what = chance.random()
        if what < 0.25 or not alive:
            alive.append(f"group {number}")
            program.append(("make", alive[-1], 0))
        elif what < 0.45 and len(alive) > 1:
            program.append(("drop", alive.pop(chance.randrange(len(alive))), 0))
        else:
            program.append(("all_reduce", chance.choice(alive), chance.randrange(5)))
    ranks = [Rank(board, rank) for rank in WORLD]
    steps = [0] * RANKS
    under_way: dict[int, int] = {}
    posted = [0] * len(program)
    while any(step < len(program) for step in steps):
        rank = ranks[chance.choice([r for r in WORLD if steps[r] < len(program)])]
        kind, name, size = program[steps[rank.rank]]
        if kind == "drop":
            rank.drop(name)
            steps[rank.rank] += 1
            continue
        stream = rank.stream(name)
        if rank.rank not in under_way:
            under_way[rank.rank] = stream.post((kind, F32, torch.Size([size])))
            posted[steps[rank.rank]] += 1
        at = under_way[rank.rank]
        is_here = all([stream._is_here(peer, at) for peer in stream._peers])
        assert stream._are_all_here(at) == is_here
        assert is_here == (posted[steps[rank.rank]] == RANKS)
        if is_here:
            stream.end(at)
            del under_way[rank.rank]
            steps[rank.rank] += 1
    for rank in ranks:
        used = rank.recorder.words[rank.recorder.region.start + layout.STREAM_COUNT]
        assert used <= sum(1 for kind, _, _ in program if kind == "make")
    board.close()
    os.close(descriptor)


# --- messages -------------------------------------------------------------------------------------


def message(ranks: list[Rank], tag: int) -> None:
    name = f"world 0->1 tag {tag}"
    ranks[0].do("send", F32, "4 elements", name=name, tag=tag)
    ranks[1].do("recv", F32, "4 elements", name=name, tag=tag)


def test_any_number_of_tags_needs_little_room(ranks: list[Rank]) -> None:
    for tag in range(1, 10_001):
        message(ranks, tag)
    for rank in ranks[:2]:
        used = rank.recorder.words[rank.recorder.region.start + layout.STREAM_COUNT]
        assert used <= 4 * MAX_TAGS


def test_a_tag_that_was_given_up_goes_on_where_it_was(ranks: list[Rank]) -> None:
    message(ranks, 7)
    for tag in range(100, 100 + 4 * MAX_TAGS):
        message(ranks, tag)
    name = "world 0->1 tag 7"
    at = ranks[0].stream(name, tag=7).post(("send", F32, "4 elements"))
    assert ranks[0].recorder.words[at] & layout.SEQUENCE_MASK == 2
    receiver = ranks[1].stream(name, tag=7)
    assert receiver.count == 1
    assert receiver.posted_by(0) == 2


def test_a_message_that_nobody_has_received_yet_is_not_given_up(ranks: list[Rank]) -> None:
    ranks[0].do("send", F32, "4 elements", name="world 0->1 tag 7", tag=7)
    for tag in range(100, 100 + 4 * MAX_TAGS):
        message(ranks, tag)
    assert ranks[1].stream("world 0->1 tag 7", tag=7).posted_by(0) == 1


# --- operations that are issued and waited for later ----------------------------------------------


def test_an_operation_that_lost_its_slot_ends_without_ending_another(ranks: list[Rank]) -> None:
    rank, stream = ranks[0], ranks[0].stream()
    at = stream.post(shape(1))
    first = stream.posted(at)
    for number in range(2, layout.RING + 2):
        last = stream.post(shape(number))
    assert last == at
    stream.end_posted(at, first)
    assert str(shape(layout.RING + 1)[2][0]) in rank.recorder.region.operations()[-1].detail


def test_an_operation_that_lost_its_slot_is_shown_while_it_is_waited_for(
    ranks: list[Rank],
) -> None:
    rank, stream = ranks[0], ranks[0].stream()
    first = stream.posted(at := post(stream, shape(1)))
    for number in range(2, layout.RING + 9):
        stream.post(shape(number))
    shown = stream.wait_for(at, first, shape(1))
    rank.recorder.block(shown)
    operation = rank.recorder.region.operations()[-1]
    assert operation.is_waiting
    assert operation.sequence == 1
    assert operation.detail == "float32 [1], sum"
    assert "test_board.py line" in operation.place
    stream.end_posted(shown, first)
    assert not any(o.sequence == 1 for o in rank.recorder.region.operations())


def test_a_rank_that_is_far_ahead_is_not_a_mismatch(ranks: list[Rank]) -> None:
    for number in range(5 * layout.RING):
        ranks[0].stream().post(shape(number))
    for number in range(5 * layout.RING):
        ranks[1].do(*shape(number))


# --- a region that begins anew --------------------------------------------------------------------


def test_nothing_of_an_earlier_process_is_taken_for_what_comes(board: Board) -> None:
    ranks = [Rank(board, rank) for rank in WORLD]
    for rank in ranks:
        for number in range(50):
            rank.do(*shape(number))
    stream = ranks[0].stream()
    again = Rank(board, 1)  # a fresh process in the place of rank 1
    again.stream()
    at = stream.post(("barrier",))
    with pytest.raises(Exception, match="ranks 1-2 did not come"):
        stream.meet(at, 0.0)


def test_a_region_reads_alike_from_another_process(board: Board) -> None:
    Rank(board, 0).block("barrier")
    assert isinstance(board.regions[0], Region)
    other = Region(board, 0)
    assert other.operations()[0].name == "barrier"


def test_where_the_text_of_the_last_request_begins_is_known(board: Board) -> None:
    region = board.regions[1]
    assert region.last_begun == 0
    region.set_log_begins(7, (100, 20))
    assert region.last_begun == 7
    assert region.log_begins(7) == (100, 20)
    assert region.log_begins(6) is None
    assert board.regions[0].last_begun == 0
    region.clear()
    assert region.last_begun == 0
