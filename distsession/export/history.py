"""What ran on the ranks, in order, so that it can be written as a script.

A record costs some microseconds and little memory: values are kept as text where they are small
and plain, and not at all otherwise. Then the record says why it cannot be written.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from distsession.export.needs import Need, collect, literal, need, resolved
from distsession.kernel.journal import Record

__all__ = [
    "Call",
    "Cell",
    "Entry",
    "EntryAdded",
    "EntryKept",
    "History",
    "HistoryCleared",
]

LIMIT = 1000
"""Entries that are kept; older ones are forgotten, and only counted."""
ALIKE_AMONG = 16
"""Entries that are searched for one like a new one, which is then told in few bytes."""
LOST = "the kernel that began it ended before it was noted"


@dataclass
class Entry:
    """Something that ran on ranks.

    Attributes:
        ranks: Where.
        name: How messages and headings call it.
        problem: Why it cannot be written as part of a script; empty if it can.
        succeeded: Whether it ended without an error on all of these ranks.
        number: Its own, in its history.
        is_run: It is a run, of which it is told elsewhere, too, how it has ended.
    """

    ranks: tuple[int, ...]
    name: str
    problem: str = ""
    succeeded: bool = False
    number: int = field(default=0, compare=False)
    is_run: bool = field(default=False, compare=False)


@dataclass
class Cell(Entry):
    """A cell, or one expression."""

    source: str = ""


@dataclass
class Call(Entry):
    """A call of a function of the notebook, or of a module.

    Attributes:
        function: What was called.
        arguments: As in its call.
        needs: The notebook's values that it uses, by name.
        times: How often in succession.
    """

    function: Callable[..., Any] | None = None
    arguments: str = ""
    needs: dict[str, Need] = field(default_factory=dict)
    times: int = 1


@dataclass(frozen=True)
class EntryAdded(Record):
    """Something has begun.

    Attributes:
        entry: As text alone; or the number of one that it is like.
    """

    number: int
    entry: Entry | int


@dataclass(frozen=True)
class EntryKept(Record):
    """It has succeeded.

    Attributes:
        merged: The number of the one before it, if that counts it as one time more.
    """

    number: int
    merged: int = 0


@dataclass(frozen=True)
class HistoryCleared(Record):
    """Nothing of what came before counts any more.

    Attributes:
        forgotten: How many entries were too many to keep.
    """

    forgotten: int = 0


Change = EntryAdded | EntryKept | HistoryCleared


class Listener(Protocol):
    """Is told of each change; with ``later``, something else is about to be told, too."""

    def __call__(self, change: Change, *, later: bool = False) -> None: ...


class History:
    """The entries of one session."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.forgotten = 0
        """How many entries were too many to keep."""
        self.on_change: Listener | None = None
        """Is told of each change, so that another process can have the same history."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What succeeded, in the order in which it was begun."""
        with self._lock:
            return tuple(entry for entry in self._entries if entry.succeeded)

    @property
    def all_entries(self) -> tuple[Entry, ...]:
        """The same with what failed."""
        with self._lock:
            return tuple(self._entries)

    def cell(self, ranks: Sequence[int], source: str, label: str) -> Entry:
        """A cell begins."""
        return self._add(Cell(tuple(ranks), label, source=source))

    def begin_cell(self, ranks: Sequence[int], source: str) -> Entry:
        """The same of one whose name its request gives; :meth:`note` is to be called then."""
        return self._add(Cell(tuple(ranks), "", source=source, is_run=True), noted=False)

    def call(
        self,
        ranks: Sequence[int],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Entry:
        """A call begins; :meth:`note` is to be called once its ranks have it."""
        try:
            entry: Entry = _call(tuple(ranks), function, args, kwargs)
        except Exception as error:  # of an object's own methods: no reason not to run
            reason = f"looking at it raises {type(error).__name__}"
            entry = Entry(tuple(ranks), "session.run(...)", reason)
        entry.is_run = True
        self._add(entry, noted=False)
        if self.on_change is not None and (like := self._like(entry)):
            self.on_change(EntryAdded(entry.number, like), later=True)
        return entry

    def pushed(self, ranks: Sequence[int], values: Mapping[str, Any], how: str) -> Entry:
        """Variables of the notebook are about to be set; plain ones are as good as a cell.

        Args:
            ranks: Where.
            values: By name.
            how: ``"push"`` or ``"scatter"``.
        """
        name = f"session.{how}({', '.join(map(str, values))})"
        texts = {key: literal(value) for key, value in values.items()}
        for key, text in texts.items():
            if text is None or how == "scatter":
                kind = type(values[key]).__name__
                reason = f"{key} is of type {kind}, in the notebook: make it in a cell instead"
                return self.other(ranks, name, reason)
        source = "".join(f"{key} = {text}\n" for key, text in texts.items())
        return self.cell(ranks, source, name)

    def other(self, ranks: Sequence[int], name: str, problem: str) -> Entry:
        """Something begins that cannot be written as part of a script, such as a transfer.

        Args:
            ranks: Where.
            name: What it is, such as ``session.push(a=...)``.
            problem: Why it cannot be written.
        """
        return self._add(Entry(tuple(ranks), name, problem))

    def note(self, entry: Entry) -> None:
        """Tell of an entry that has begun, with the sources of what it calls."""
        tell = self.on_change
        if tell is None or (isinstance(entry, Call) and self._like(entry)):  # it is told already
            return
        tell(EntryAdded(entry.number, _as_text(entry)), later=isinstance(entry, Cell))

    def _like(self, entry: Entry) -> int:
        """The number of an entry shortly before that is like it; 0 if there is none."""
        with self._lock:
            before = self._entries[-ALIKE_AMONG:]
        found = (e for e in reversed(before) if e.number < entry.number and _alike(e, entry))
        return next((each.number for each in found), 0)

    def keep(self, entry: Entry) -> None:
        """An entry has succeeded. The same call many times in succession is one entry."""
        with self._lock:
            merged = self._keep(entry)
        if self.on_change is not None:
            self.on_change(EntryKept(entry.number, merged), later=entry.is_run)

    def clear(self) -> None:
        """The ranks' variables are lost, and with them what earlier entries did."""
        with self._lock:
            self._entries.clear()
            self.forgotten = 0
        if self.on_change is not None:
            self.on_change(HistoryCleared())

    # --- for another process ----------------------------------------------------------------------

    def changes(self) -> Iterator[Change]:
        """What leads to this history from an empty one."""
        with self._lock:
            entries = list(self._entries)
        yield HistoryCleared(self.forgotten)
        for entry in entries:
            yield EntryAdded(entry.number, _as_text(entry))

    def restore(self, changes: Iterable[object]) -> None:
        """Become the history of which these changes were told.

        A change may be told twice, once as part of all.
        """
        for change in changes:
            match change:
                case EntryAdded(number, Entry() as entry):
                    self._restore(replace(entry, number=number))
                case EntryAdded(number, int(like)):
                    if (found := self.find(like)) is not None:
                        self._restore(_again(found, number))
                case EntryKept(number, merged):
                    self._restore_kept(number, merged)
                case HistoryCleared(forgotten):
                    self._entries.clear()
                    self.forgotten = forgotten
        last = max((entry.number for entry in self._entries), default=0)
        self._numbers = itertools.count(last + 1)

    def find(self, number: int) -> Entry | None:
        """The entry with this number, if it is still kept."""
        with self._lock:
            return next((each for each in reversed(self._entries) if each.number == number), None)

    def lost(self, ranks: Sequence[int], name: str) -> Entry:
        """Something was begun of which no more is known."""
        return self._add(Entry(tuple(ranks), name, LOST))

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, entry: Entry, *, noted: bool = True) -> Entry:
        with self._lock:
            entry.number = next(self._numbers)
            self._append(entry)
        if noted:
            self.note(entry)
        return entry

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) > LIMIT:
            self.forgotten += self._entries.pop(0).succeeded

    def _keep(self, entry: Entry) -> int:
        """Gives the number of the entry before, if that counts it."""
        entry.succeeded = True
        if len(self._entries) < 2 or self._entries[-1] is not entry:
            return 0
        last = self._entries[-2]
        if isinstance(entry, Call) and isinstance(last, Call) and _is_again(last, entry):
            last.times += 1
            self._entries.pop()
            return last.number
        return 0

    def _restore(self, entry: Entry) -> None:
        is_new = not self._entries or self._entries[-1].number < entry.number
        if is_new or self.find(entry.number) is None:
            with self._lock:
                self._append(entry)

    def _restore_kept(self, number: int, merged: int) -> None:
        entry, before = self.find(number), self.find(merged)
        if entry is None:
            return
        with self._lock:
            if isinstance(before, Call):
                before.times += 1
                self._entries = [each for each in self._entries if each is not entry]
            else:
                entry.succeeded = True


def _as_text(entry: Entry) -> Entry:
    """The same, with nothing in it that only this process has."""
    if not isinstance(entry, Call):
        return entry
    try:
        return replace(entry, function=None, needs=resolved(entry.needs))
    except Exception as error:  # of an object's own methods
        problem = f"looking at it raises {type(error).__name__}"
        return replace(entry, function=None, needs={}, problem=problem)


def _again(entry: Entry, number: int) -> Entry:
    """Another one that is like it, which has just begun."""
    begun = replace(entry, number=number, succeeded=False)
    return replace(begun, times=1) if isinstance(begun, Call) else begun


def _is_again(last: Call, entry: Call) -> bool:
    return last.succeeded and _alike(last, entry)


def _alike(last: Entry, entry: Entry) -> bool:
    return (
        isinstance(last, Call)
        and isinstance(entry, Call)
        and last.function is entry.function
        and (last.function is not None or last.needs is entry.needs)  # restored as one like it
        and (last.name, last.ranks, last.arguments, last.needs, last.problem)
        == (entry.name, entry.ranks, entry.arguments, entry.needs, entry.problem)
    )


# --- calls ----------------------------------------------------------------------------------------


def _call(
    ranks: tuple[int, ...],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Call:
    title = getattr(function, "__qualname__", type(function).__name__)
    call = Call(ranks, f"session.run({title})")
    parts = []
    for name, value in [*enumerate(args), *kwargs.items()]:
        text = literal(value)
        if text is None:
            call.problem = f"its argument {name} is of type {type(value).__name__}"
            return call
        parts.append(text if isinstance(name, int) else f"{name}={text}")
    call.arguments = ", ".join(parts)
    found = need(title, function)
    if found.problem:
        call.problem = found.problem
        return call
    call.function = function
    call.needs = {title: found}
    if found.source_of is not None:
        collect(found.source_of, call.needs)
    problems = [each.problem for each in call.needs.values() if each.problem]
    call.problem = problems[0] if problems else ""
    return call
