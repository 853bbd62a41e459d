"""Whether the ranks' connections can stay when an operation was given up.

A pure function of what ranks have written on the board. Where ranks meet before an operation, who
is freed mostly waits in that meeting, and nothing has been sent. The connections can stay if that
is certain of all ranks: each says that nothing is half-way there, and all members of a group, and
both ends of messages, have begun as many operations, so that the next is the same one for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsession.protocol.board import Region

__all__ = ["begun_where_whole"]


def begun_where_whole(regions: Sequence[Region]) -> tuple[int, ...]:
    """How many operations each rank has begun, where all connections are whole; else nothing.

    Args:
        regions: Of all ranks, none of which runs anything. What a rank begins all the same is told
            by its number afterwards.
    """
    generations = {region.connected_in for region in regions}
    if len(generations) != 1 or -1 in generations:
        return ()
    totals: list[int] = []
    begun: dict[int, tuple[tuple[int, tuple[int, ...]], set[int]]] = {}
    for region in regions:
        handed_on = region.handed_on()
        totals.append(sum(count for count, _ in handed_on.values()))
        for key, said in handed_on.items():
            first, ranks = begun.setdefault(key, (said, set()))
            if said != first:
                return ()
            ranks.add(region.rank)
    if any(ranks != set(members) for (_, members), ranks in begun.values()):
        return ()
    return tuple(totals)
