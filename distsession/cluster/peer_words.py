"""What ranks read of ranks of other nodes on their board: few words, which the kernel writes there.

Whether somebody sits at a rank's debugger, or types what it asked for: no time limit counts then,
on any node. And how many messages a rank has begun to send to a rank of another node, which a
receive from whoever sends first waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from distsession.protocol import board as layout
from distsession.protocol.board import Board, Region
from distsession.protocol.operation_names import Pair

__all__ = ["PeerWords"]

Word = tuple[int, int]
"""Where it is on the board, and what."""


class PeerWords:
    """Finds what is to be written on the boards of nodes, of ranks that are on others.

    Args:
        board: With the regions of all ranks.
        node_of: Gives the node of a rank.
    """

    def __init__(self, board: Board, node_of: Callable[[int], int]):
        self._board, self._node_of = board, node_of
        self._written: dict[int, dict[int, int]] = {}
        """For each node, what has been written there of messages to its ranks."""
        self._everywhere: dict[int, int] = {}
        """What has been written on all nodes but the rank's own."""

    def changes(self, ranks: Iterable[int], nodes: Iterable[int]) -> dict[int, list[Word]]:
        """What has changed since the last call, by the node where it is to be written.

        Args:
            ranks: Of whose regions.
            nodes: That have a board of their own.
        """
        found: defaultdict[int, list[Word]] = defaultdict(list)
        nodes = frozenset(nodes)
        for node in nodes - self._written.keys():
            self._written[node] = {}
            for at, value in self._everywhere.items():
                if value and self._node_of(at // layout.REGION) != node:
                    found[node].append((at, value))
        for rank in ranks:
            region, its = self._board.regions[rank], self._node_of(rank)
            for at, value in self._questions(region):
                if self._everywhere.get(at, 0) != value:
                    self._everywhere[at] = value
                    for node in nodes - {its}:
                        found[node].append((at, value))
            for node, word in self._messages(region, its):
                if node in nodes and self._is_new(node, word):
                    found[node].append(word)
        return found

    def forget(self, node: int) -> None:
        """Another relay has connected: its board may have nothing of what was written."""
        self._written.pop(node, None)

    def _is_new(self, node: int, word: Word) -> bool:
        at, value = word
        written = self._written[node]
        if written.get(at, 0) == value:
            return False
        written[at] = value
        return True

    def _questions(self, region: Region) -> Iterator[Word]:
        for word in (layout.IN_DEBUGGER, layout.ASKS):
            at = region.start + word
            yield at, self._board.words[at]

    def _messages(self, region: Region, its: int) -> Iterator[tuple[int, Word]]:
        """The heads of streams of messages to other nodes; a head's key comes last."""
        words = self._board.words
        count = region.start + layout.STREAM_COUNT
        for at, head in region.streams():
            pair = Pair.from_name(head.name)
            if pair is None or pair.source != region.rank or self._node_of(pair.target) == its:
                continue
            node = self._node_of(pair.target)
            yield node, (count, words[count])
            for word in (layout.INCARNATION, layout.COUNT, layout.KEY):
                yield node, (at + word, words[at + word])
