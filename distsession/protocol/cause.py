"""Why an operation broke off, in words: who called what, and who did not come.

Pure functions of what ranks called. The odd ones out are named first: what fewer ranks did than
others is more likely what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distsession.protocol.messages import Called, Mismatch, TimedOut
from distsession.protocol.operation_names import (
    WORLD,
    CodeLine,
    Pair,
    SplitSizes,
    details_of,
    group_title,
)
from distsession.ranks import ranks_text

__all__ = [
    "ONE_THREAD",
    "late_remedy",
    "late_text",
    "merged",
    "mismatch_remedy",
    "mismatch_text",
    "sentence",
    "threads_text",
]

MOST_SIDES = 4
"""How many different calls are told; with more, the rest are counted."""


def sentence(text: str) -> str:
    """The text, with a full stop where it does not end a sentence yet."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def merged(parts: Iterable[Mismatch]) -> Mismatch:
    """What several ranks have seen of the same operation, together; there is at least one."""
    first, *others = parts
    is_async = any(part.is_async for part in (first, *others))
    posted = {post.rank: post for part in (first, *others) for post in part.calls}
    together = tuple(posted[rank] for rank in sorted(posted))
    is_begun = any(part.is_begun for part in (first, *others))
    beside = tuple(dict.fromkeys(call for part in (first, *others) for call in part.beside))
    return Mismatch(first.group, first.sequence, together, is_async, is_begun, beside)


# --- a mismatch -----------------------------------------------------------------------------------


def mismatch_text(mismatch: Mismatch) -> str:
    """Who called what: ``rank 2 called all_reduce with max, ranks 0-1 with sum, at In[4] line 3``.

    The odd ranks out come first, and of what else is equal nothing is said.
    """
    threads = threads_text(mismatch.group, (*mismatch.calls, *mismatch.beside))
    return f"{_sides_text(mismatch)}{f'. {threads}' if threads else ''}"


def _sides_text(mismatch: Mismatch) -> str:
    if text := _sizes_text(mismatch):
        return text
    sides = _sides(mismatch.calls, by_thread=_is_mixed(mismatch) and not mismatch.beside)
    if len(sides) == 1 and mismatch.is_begun:
        (side,) = sides
        last = f"{side.name}{_within(mismatch.group, side.name)}"
        at = f" at {side.place}" if side.place else ""
        return (
            f"{ranks_text(side.ranks)} called different operations before {last}{at}, which are no "
            "longer on record"
        )
    places = {side.place for side in sides}
    names = {side.name for side in sides}
    common = next(iter(places)) if len(places) == 1 else ""
    if len(names) == 1:
        details = _differing([side.detail for side in sides])
    else:
        details = [side.detail for side in sides]
    parts = []
    for number, (side, detail) in enumerate(zip(sides, details, strict=True)):
        if len(names) > 1:
            what = f"called {side.name}{_within(mismatch.group, side.name)}"
            what += f" ({detail})" if detail else ""
        elif number == 0:
            what = f"called {side.name}{_within(mismatch.group, side.name)} with {detail}"
        else:
            what = f"with {detail}"
        at = f" at {side.place}" if side.place and not common else ""
        at += IN_THREAD if side.in_thread else ""
        parts.append(f"{ranks_text(side.ranks)} {what}{at}")
    if len(parts) > MOST_SIDES:
        rest = sorted(rank for side in sides[MOST_SIDES:] for rank in side.ranks)
        parts[MOST_SIDES:] = [f"{ranks_text(rest)} something else again"]
    return f"{', '.join(parts)}{f', at {common}' if common else ''}"


def mismatch_remedy(mismatch: Mismatch) -> str:
    """What has become of it, and what to do."""
    pair = Pair.from_name(mismatch.group)
    what = f"message {mismatch.sequence}" if pair else f"operation {mismatch.sequence}"
    of = (
        f"from rank {pair.source} to rank {pair.target}"
        if pair
        else f"of {group_title(mismatch.group)}"
    )
    begun = "It was not begun, and no tensor of it was changed"
    if mismatch.is_async:
        begun = "It was not begun where that was seen; elsewhere its tensors may have changed"
    if mismatch.is_begun:
        begun = (
            "Ranks of different nodes are compared when they have begun it, so its tensors may "
            "have changed"
        )
    is_threads = bool(mismatch.beside) or _is_mixed(mismatch)
    return f"This is {what} {of}. {begun}. {ONE_THREAD if is_threads else 'Make the calls agree.'}"


def _is_mixed(mismatch: Mismatch) -> bool:
    """Whether some ranks have called it in their main thread, and others in another one."""
    return len({call.in_thread for call in mismatch.calls}) > 1


@dataclass(frozen=True)
class _Side:
    """Ranks that called the same."""

    ranks: tuple[int, ...]
    name: str
    detail: str
    in_thread: bool
    place: str


def _sides(posted: Sequence[Called], *, by_thread: bool) -> list[_Side]:
    """Those that called the same together; first those that are fewer, then by rank."""
    ranks: dict[tuple[str, str, bool], list[int]] = {}
    places: dict[tuple[str, str, bool], dict[str, None]] = {}
    for post in sorted(posted, key=lambda post: post.rank):
        key = (post.name, post.detail, by_thread and post.in_thread)
        ranks.setdefault(key, []).append(post.rank)
        if post.place:
            places.setdefault(key, {})[post.place] = None
    sides = [
        _Side(tuple(who), *key, _either(list(places.get(key, ())))) for key, who in ranks.items()
    ]
    return sorted(sides, key=lambda side: (len(side.ranks), side.ranks))


def _either(places: Sequence[str]) -> str:
    """``In[3] line 4 and line 6``: a file is named once."""
    text = last = ""
    for place in places[:3]:
        file, line = CodeLine.from_name(place)
        text += f"{' and ' if text else ''}{f'line {line}' if text and file == last else place}"
        last = file
    return f"{text} and elsewhere" if len(places) > 3 else text


def _differing(details: Sequence[str]) -> list[str]:
    """Of each detail the parts in which any two differ."""
    parts = [details_of(detail) for detail in details]
    if len(details) == 1 or len({len(each) for each in parts}) != 1:
        return [detail or "nothing" for detail in details]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    return [", ".join(p for p, d in zip(each, differ, strict=True) if d) for each in parts]


def _sizes_text(mismatch: Mismatch) -> str:
    """For an all_to_all: whose sizes do not fit to those of its peers; empty if that is not it."""
    posted = {post.rank: post for post in mismatch.calls}
    sizes: dict[int, SplitSizes] = {}
    rest = set()
    for rank, post in posted.items():
        found = SplitSizes.from_description(post.detail)
        if found is None:
            return ""
        sizes[rank] = found
        rest.add((post.name, post.detail.removesuffix(found.description)))
    ranks = sorted(sizes)
    world = {len(part) for both in sizes.values() for part in both if part}
    # Of the default group it is known who the members are, though some have not come yet.
    members = list(range(*world)) if mismatch.group == WORLD and len(world) == 1 else ranks
    if len(rest) != 1 or world != {len(members)}:
        return ""
    wrong = [
        (source, target, sizes[source][0][n], sizes[target][1][m])
        for m, source in enumerate(members)
        for n, target in enumerate(members)
        if source in sizes and target in sizes
        if sizes[source][0] and sizes[target][1] and sizes[source][0][n] != sizes[target][1][m]
    ]
    if not wrong:
        return ""
    # Whoever is part of most of what does not fit; of both ends of one message the sender.
    count = {r: sum(r in (a, b) for a, b, _, _ in wrong) for r in ranks}
    odd = max(ranks, key=lambda rank: (count[rank], -rank))
    name = posted[odd].name
    own = [(a, b, s, e) for a, b, s, e in wrong if odd in (a, b)]
    told = [
        f"to send {s} to rank {b}, which expects {e}"
        if a == odd and b != odd
        else f"to receive {e} from rank {a}, which sends {s}"
        for a, b, s, e in own[:2]
    ]
    more = f" (and {len(own) - 2} more)" if len(own) > 2 else ""
    at = f", at {posted[odd].place}" if posted[odd].place else ""
    within = _within(mismatch.group, name)
    return f"rank {odd} called {name}{within} {' and '.join(told)}{more}{at}"


# --- two threads in one group -------------------------------------------------------------------

IN_THREAD = " in another thread than the main one"
ONE_THREAD = (
    "One thread at a time may use a group: let one thread issue all of its operations, or make a "
    "group for each thread by dist.new_group()."
)


def threads_text(group: str, calls: Iterable[Called]) -> str:
    """Which ranks have several threads in one group, and in what; empty if none has.

    Such as ``Two threads of rank 0 use the default group at once, for barrier at In[2] line 3 and
    broadcast (float32 [2], root 0) at In[2] line 1``.

    Args:
        group: Its name.
        calls: What threads of ranks wait in, each in another one.
    """
    used: dict[int, list[str]] = {}
    for call in calls:
        detail = f" ({call.detail})" if call.detail else ""
        at = f" at {call.place}" if call.place else ""
        used.setdefault(call.rank, []).append(f"{call.name}{detail}{at}")
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, texts in sorted(used.items()):
        if len(texts) > 1:
            alike.setdefault(tuple(sorted(texts)), []).append(rank)
    parts: list[str] = []
    for listed, ranks in alike.items():
        count = {2: "two", 3: "three"}.get(len(listed), str(len(listed)))
        who = f"{'' if len(ranks) == 1 else 'each of '}{ranks_text(ranks)}"
        use = "" if parts else f" use {group_title(group)} at once,"
        what = f"{', '.join(listed[:-1])} and {listed[-1]}"
        parts.append(f"{count} threads of {who}{use} for {what}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


# --- a time limit ---------------------------------------------------------------------------------


def late_text(overdue: TimedOut, waiting: Sequence[int], places: Mapping[int, str]) -> str:
    """Who did not come, to what, and where they were meanwhile.

    Args:
        overdue: As told by the ranks that waited.
        waiting: These ranks.
        places: Where ranks were when it was told, as far as that is known.
    """
    operation = overdue.operation
    name = f"{operation.name}{_within(operation.group, operation.name)}"
    detail = f" ({operation.detail})" if operation.detail else ""
    limit = f" within {overdue.limit:g} s" if overdue.limit else " in time"
    at = f" at {operation.place}" if operation.place else ""
    pair = Pair.from_name(operation.group)
    if overdue.missing and pair is not None and pair.source is not None:
        verb = f"send to rank {pair.target}" if operation.name == "recv" else "receive it"
        who = f"{ranks_text(overdue.missing)} did not {verb}{limit}"
        text = f"{who}; {ranks_text(waiting)} waited in {name}{detail}{at}"
    elif overdue.missing and pair is not None:
        who = f"no rank sent to rank {pair.target}{limit}"
        text = f"{who}; {ranks_text(waiting)} waited in {name}{detail}{at}"
    elif overdue.missing:
        who = f"{ranks_text(overdue.missing)} did not come to {name}{detail}{limit}"
        text = f"{who}, in which {ranks_text(waiting)} waited{at}"
    else:
        text = f"{ranks_text(waiting)} waited in {name}{detail}{at}, which did not end{limit}"
    where: dict[str, list[int]] = {}
    for rank in overdue.missing:
        if places.get(rank):
            where.setdefault(places[rank], []).append(rank)
    told = [
        f"{ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} at {place}"
        for place, ranks in where.items()
    ]
    text = f"{text}; {', '.join(told)}" if told else text
    threads = threads_text(operation.group, overdue.threads)
    return f"{text}. {threads}" if threads else text


def late_remedy(overdue: TimedOut) -> str:
    """What to do about that."""
    if overdue.threads:
        return ONE_THREAD
    return (
        "That is the time limit of this process group (the option timeout, or what the call or "
        "the group was given): where a rank only needs longer, give it more."
    )


# --- groups ---------------------------------------------------------------------------------------


def _within(group: str, name: str) -> str:
    """To be said behind an operation's name: of which group it is, or to whom a message goes."""
    pair = Pair.from_name(group)
    if pair is not None and pair.source is not None:
        ends = {"send": f" to rank {pair.target}", "recv": f" from rank {pair.source}"}
        within, group = ends.get(name, ""), pair.group
    else:
        within = ""
    return within if group == WORLD else f"{within} of {group}"
