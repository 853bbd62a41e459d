"""The boards of several nodes, and the whole one that the kernel has."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from distsession.cluster.peer_words import PeerWords
from distsession.engine.collectives.recorder import Recorder, Stream
from distsession.errors import CollectiveMismatchError
from distsession.protocol import board as layout
from distsession.protocol import board_mirror
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.board_mirror import Mirror
from distsession.protocol.cause import mismatch_remedy, mismatch_text
from distsession.protocol.comparison import Comparison, completed, late_members
from distsession.protocol.messages import Mismatch, Operation
from distsession.protocol.operation_names import Pair, SplitSizes

WORLD_SIZE, FAMILY = 4, (0, 0)
SUM = ("all_reduce", "float32 [4]", "sum")
MAX = ("all_reduce", "float32 [4]", "max")


def node_of(rank: int) -> int:
    return rank // 2


def make_board() -> Board:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(WORLD_SIZE))
    board = Board(descriptor, WORLD_SIZE)
    os.close(descriptor)
    return board


class Nodes:
    """Two nodes of two ranks each; the kernel's board is that of the first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.whole, self.far = make_board(), make_board()
        self.mirror = Mirror(self.far, (2, 3), lambda: self.now)
        self.ranks = [
            Recorder(
                self.far if rank > 1 else self.whole, rank, here=(2, 3) if rank > 1 else (0, 1)
            )
            for rank in range(WORLD_SIZE)
        ]
        for rank in self.ranks:
            rank.reset()
        self.comparison = Comparison(self.whole, node_of)

    def stream(self, rank: int, name: str = "world", members: tuple[int, ...] = ()) -> Stream:
        return self.ranks[rank].stream(FAMILY, name, members or tuple(range(WORLD_SIZE)))

    def post(self, rank: int, key: tuple[object, ...]) -> int:
        return self.stream(rank).post(key)

    def all_post(self, *, but: tuple[int, ...] = ()) -> None:
        for rank in range(WORLD_SIZE):
            at = self.post(rank, MAX if rank in but else SUM)
            self.stream(rank).end(at)

    def look(self, *, before_answer: bool = False) -> int:
        """Mirror what has changed; gives how many bytes that were."""
        self.now += 1
        frames = board_mirror.pack(self.mirror.changes(before_answer=before_answer))
        board_mirror.apply(self.whole, board_mirror.unpack(frames), (2, 3))
        return len(frames[1])

    def find(self) -> Mismatch | None:
        self.look()
        return self.comparison.find()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    del nodes.ranks
    for board in (nodes.whole, nodes.far):
        board.close()


# --- what changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("behind_ns", [5_000_000_000, -5_000_000_000])
def test_how_far_a_clock_is_behind_stands_where_the_kernel_has_it(
    nodes: Nodes, behind_ns: int
) -> None:
    region = nodes.whole.regions[3]
    region.clock_behind_ns = behind_ns
    nodes.post(3, SUM)
    nodes.look()
    assert len(region.operations()) == 1
    assert region.clock_behind_ns == behind_ns  # the host's own board does not say it
    assert nodes.whole.regions[2].clock_behind_ns == 0


def test_the_kernel_sees_what_a_rank_of_another_node_does(nodes: Nodes) -> None:
    at = nodes.post(3, SUM)
    nodes.ranks[3].block(at)
    nodes.ranks[3].region.set_last_line("In[3] line 4")
    assert nodes.whole.regions[3].operations() == ()
    nodes.look()
    [operation] = nodes.whole.regions[3].operations()
    assert operation.name == "all_reduce"
    assert operation.is_waiting
    assert nodes.whole.regions[3].last_line == "In[3] line 4"
    assert nodes.whole.regions[3].sequences() == {"world": 1}


def test_what_has_not_changed_is_not_sent_again(nodes: Nodes) -> None:
    nodes.all_post()
    nodes.look()
    nodes.look()
    assert nodes.look() == 0
    nodes.post(2, SUM)
    assert 0 < nodes.look() < 2 * layout.STREAM * 8


def run(nodes: Nodes, rank: int, request: int) -> None:
    """What a request leaves in the header of its rank."""
    region = nodes.ranks[rank].region
    region.set_log_begins(request, (10 * request, 0))
    begin(nodes, rank, request)
    begin(nodes, rank, 0)


def begin(nodes: Nodes, rank: int, request: int) -> None:
    start = nodes.ranks[rank].region.start
    nodes.far.words[start + layout.SINCE] = time.monotonic_ns()
    nodes.far.words[start + layout.REQUEST] = request


def test_that_a_rank_was_at_something_can_wait_until_after_the_answer(nodes: Nodes) -> None:
    run(nodes, 2, 1)
    nodes.look()
    for request in range(2, 5):
        run(nodes, 2, request)
        assert nodes.look(before_answer=True) == 0
    assert nodes.whole.regions[2].log_begins(4) is None
    assert nodes.look() > 0
    assert nodes.whole.regions[2].log_begins(4) == (40, 0)
    assert nodes.look() == 0


def test_an_answer_comes_after_all_else_that_its_rank_has_done(nodes: Nodes) -> None:
    nodes.look()
    run(nodes, 2, 1)
    nodes.ranks[2].region.set_without_group(True)
    nodes.ranks[3].stream(FAMILY, "world", (0, 1, 2, 3)).post(SUM)
    assert nodes.look(before_answer=True) > 0
    assert nodes.whole.regions[2].is_without_group
    assert nodes.whole.regions[2].log_begins(1) == (10, 0)
    assert len(nodes.whole.regions[3].operations()) == 1


def test_that_a_rank_is_at_rest_comes_before_the_answer_if_it_was_seen_at_work(
    nodes: Nodes,
) -> None:
    begin(nodes, 3, 7)
    nodes.look()
    assert nodes.whole.regions[3].request == 7
    begin(nodes, 3, 0)
    nodes.look(before_answer=True)
    assert nodes.whole.regions[3].request == 0
    begin(nodes, 3, 8)  # another rank's answer tells that this one is at work
    nodes.look(before_answer=True)
    assert nodes.whole.regions[3].request == 8


def test_a_text_that_was_being_written_comes_again(nodes: Nodes) -> None:
    region = nodes.ranks[2].region
    number = region.add_text("whole")
    at = layout.REGION * 2 + layout.HEADER + layout.STREAMS * layout.STREAM + number + 1
    written = nodes.far.words[at]
    nodes.far.words[at] = 0  # as it was a moment before
    nodes.look()
    assert nodes.whole.regions[2].text(number) != "whole"
    nodes.far.words[at] = written
    nodes.look()
    assert nodes.whole.regions[2].text(number) == "whole"


def test_texts_are_mirrored_round_the_ring(nodes: Nodes) -> None:
    region = nodes.ranks[2].region
    for number in range(400):
        last = region.add_text(str(number) + "x" * 8000)
        nodes.look()
    assert last > layout.TEXT_WORDS
    text = nodes.whole.regions[2].text(last)
    assert text is not None
    assert text.startswith("399x")


def test_a_generation_that_begins_is_mirrored(nodes: Nodes) -> None:
    nodes.all_post()
    nodes.look()
    nodes.ranks[2].reset()
    nodes.look()
    assert nodes.whole.regions[2].sequences() == {}
    nodes.ranks[2].stream((1, 0), "world", range(WORLD_SIZE)).post(MAX)
    nodes.look()
    assert [op.detail for op in nodes.whole.regions[2].operations()] == ["float32 [4], max"]


@pytest.mark.parametrize(
    "frames", [[], [b"x"], [b"x" * 16], [b"x" * 15, b""], [bytes(8) + b"\x01" + bytes(7), b""]]
)
def test_frames_that_are_no_changes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match="changes of a board"):
        board_mirror.unpack(frames)


@pytest.mark.parametrize("at", [0, layout.REGION * 8, layout.REGION * 16 - 4, layout.REGION * 40])
def test_nothing_is_written_outside_of_a_nodes_regions(nodes: Nodes, at: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        board_mirror.apply(nodes.whole, [(at, b"12345678")], (2, 3))


# --- what ranks take from that --------------------------------------------------------------------


def test_a_rank_does_not_wait_for_what_another_node_has_posted(nodes: Nodes) -> None:
    for rank in (0, 1):
        at = nodes.post(rank, SUM)
    nodes.stream(1).meet(at, 5.0)


def test_ranks_of_one_node_compare_themselves(nodes: Nodes) -> None:
    nodes.post(2, SUM)
    at = nodes.post(3, MAX)
    with pytest.raises(CollectiveMismatchError, match="rank 2 called all_reduce with sum, rank 3"):
        nodes.stream(3).meet(at, 5.0)


def test_who_is_late_is_seen_on_the_whole_board_alone(nodes: Nodes) -> None:
    for rank in (0, 1, 3):
        nodes.post(rank, SUM)
    nodes.look()
    operation = Operation("all_reduce", "world", (0, 1, 2, 3), 1)
    assert late_members(nodes.whole, operation) == (2,)


def test_a_message_from_another_node_is_seen_by_who_takes_what_comes_first(nodes: Nodes) -> None:
    words = PeerWords(nodes.whole, node_of)
    name = Pair("world", 0, 3).name
    nodes.stream(0, name, (0, 3)).post(("send", "float32 [4]"))
    receiver = nodes.stream(3, name, (0, 3))
    assert receiver.posted_by(0) == 0
    changes = words.changes([0, 1], [1])
    for at, word in changes[1]:
        nodes.far.words[at] = word
    assert receiver.posted_by(0) == 1
    assert words.changes([0, 1], [1]) == {}
    words.forget(1)
    assert words.changes([0, 1], [1]) == changes


def test_a_debugger_of_one_node_is_known_on_the_others(nodes: Nodes) -> None:
    words = PeerWords(nodes.whole, node_of)
    at = nodes.ranks[0].region.start + layout.IN_DEBUGGER
    nodes.whole.words[at] = 1
    for place, word in words.changes([0, 1], [1])[1]:
        nodes.far.words[place] = word
    assert nodes.ranks[3].is_input_awaited()
    assert words.changes([0, 1], [1]) == {}
    nodes.whole.words[at] = 0
    assert words.changes([0, 1], [1]) == {1: [(at, 0)]}


def test_a_debugger_is_known_on_nodes_that_come_later(nodes: Nodes) -> None:
    words = PeerWords(nodes.whole, node_of)
    at = nodes.ranks[0].region.start + layout.IN_DEBUGGER
    nodes.whole.words[at] = 1
    assert words.changes([0, 1], []) == {}
    assert words.changes([], [0, 1]) == {1: [(at, 1)]}
    words.forget(1)
    assert words.changes([], [0, 1]) == {1: [(at, 1)]}


# --- what the kernel compares ---------------------------------------------------------------------


def test_what_matches_is_no_mismatch_however_much_of_it_there_is(nodes: Nodes) -> None:
    for _ in range(3 * layout.RING):
        nodes.all_post()
        assert nodes.find() is None


def test_nodes_that_call_something_else_are_found(nodes: Nodes) -> None:
    nodes.all_post()
    assert nodes.find() is None
    nodes.all_post(but=(2, 3))
    found = nodes.find()
    assert found is not None
    assert found.sequence == 2
    said = mismatch_text(found)
    assert said.startswith("ranks 0-1 called all_reduce with sum, ranks 2-3 with max")
    assert "so its tensors may have changed" in mismatch_remedy(found)


def test_a_mismatch_is_found_behind_others_that_match(nodes: Nodes) -> None:
    nodes.all_post(but=(2, 3))
    for _ in range(layout.RING // 2):
        nodes.all_post()
    found = nodes.find()
    assert found is not None
    assert found.sequence == 1


def test_a_mismatch_that_is_no_longer_on_record_is_found_as_well(nodes: Nodes) -> None:
    nodes.all_post(but=(2, 3))
    for _ in range(3 * layout.RING):
        nodes.all_post()
    found = nodes.find()
    assert found is not None
    assert "ranks 0-3 called different operations before all_reduce" in mismatch_text(found)


def test_a_node_that_is_behind_is_compared_when_it_comes(nodes: Nodes) -> None:
    for _ in range(5):
        nodes.post(0, SUM)
    assert nodes.find() is None
    for _ in range(4):
        nodes.post(2, SUM)
        assert nodes.find() is None
    nodes.post(2, MAX)
    found = nodes.find()
    assert found is not None
    assert found.sequence == 5


def test_an_operation_that_failed_here_alone_leaves_no_mismatch(nodes: Nodes) -> None:
    nodes.all_post()
    nodes.stream(0).withdraw(nodes.post(0, MAX))
    nodes.all_post()
    assert nodes.find() is None


def test_what_backends_refuse_one_after_the_other_leaves_no_mismatch(nodes: Nodes) -> None:
    late = [nodes.post(rank, MAX) for rank in (2, 3)]
    for rank in (0, 1):
        nodes.stream(rank).withdraw(nodes.post(rank, MAX))
        nodes.post(rank, SUM)
    assert nodes.find() is None
    for rank, at in zip((2, 3), late, strict=True):
        nodes.stream(rank).withdraw(at)
        nodes.post(rank, SUM)
    assert nodes.find() is None


def test_what_a_backend_refuses_on_one_host_alone_is_a_mismatch(nodes: Nodes) -> None:
    late = nodes.post(2, MAX)
    for rank in (0, 1):
        nodes.stream(rank).withdraw(nodes.post(rank, MAX))
        nodes.post(rank, SUM)
    assert nodes.find() is None
    nodes.stream(2).accepted(late)
    assert nodes.find() is not None


def test_who_waits_for_ranks_that_have_refused_is_found(nodes: Nodes) -> None:
    nodes.post(0, SUM)
    nodes.post(2, SUM)
    at = nodes.post(3, MAX)
    for rank in (2, 3):
        nodes.stream(rank).refuse(at if rank == 3 else at - layout.REGION)
    found = nodes.find()
    assert found is not None
    assert [call.rank for call in found.calls] == [0, 2, 3]


def test_a_mismatch_of_one_node_is_completed_with_the_calls_of_others(nodes: Nodes) -> None:
    nodes.post(0, SUM)
    nodes.post(2, SUM)
    at = nodes.post(3, MAX)
    with pytest.raises(CollectiveMismatchError) as caught:
        nodes.stream(3).compare(at)
    seen: Mismatch = vars(caught.value)["_distsession_reason"]
    nodes.look()
    whole = completed(nodes.whole, seen)
    said = mismatch_text(whole)
    assert said.startswith("rank 3 called all_reduce with max, ranks 0,2 with sum")
    assert whole.is_begun
    assert completed(nodes.whole, whole) is whole


@pytest.mark.parametrize(("received", "fits"), [(1, True), (2, False)])
def test_sizes_of_an_all_to_all_are_compared(nodes: Nodes, received: int, fits: bool) -> None:
    for rank in range(WORLD_SIZE):
        ones = (1,) * WORLD_SIZE
        sizes = SplitSizes(ones, (received, 1, 1, 1) if rank == 3 else ones)
        nodes.post(rank, ("all_to_all_single", "float32 [4]", sizes))
    assert (nodes.find() is None) is fits
