"""What ran on the ranks, in order, so that it can be written as a script.

A record costs some microseconds and little memory: values are kept as text where they are small
and plain, and not at all otherwise. Then the record says why it cannot be written.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["Call", "Cell", "Entry", "History", "Need", "names_of", "need", "stored_names"]

LIMIT = 1000
"""Entries that are kept; older ones are forgotten, and only counted."""
TEXT_MAX = 2000
"""Characters of a value that is written as text."""


@dataclass
class Entry:
    """Something that ran on ranks.

    Attributes:
        ranks: Where.
        name: How messages and headings call it.
        problem: Why it cannot be written as part of a script; empty if it can.
        succeeded: Whether it ended without an error on all of these ranks.
    """

    ranks: tuple[int, ...]
    name: str
    problem: str = ""
    succeeded: bool = False


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
class Need:
    """A value of the notebook that a function uses.

    Attributes:
        text: The statement that makes it; empty if its source has to be looked up.
        source_of: A function or class of the notebook.
        problem: Why it cannot be written.
    """

    text: str = ""
    source_of: Any = None
    problem: str = ""


class History:
    """The entries of one session."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        self.forgotten = 0
        """How many entries were too many to keep."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What succeeded, in the order in which it was begun."""
        with self._lock:
            return tuple(entry for entry in self._entries if entry.succeeded)

    def cell(self, ranks: Sequence[int], source: str, label: str) -> Entry:
        """A cell begins."""
        return self._add(Cell(tuple(ranks), label, source=source))

    def call(
        self,
        ranks: Sequence[int],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Entry:
        """A call begins."""
        try:
            entry: Entry = _call(tuple(ranks), function, args, kwargs)
        except Exception as error:  # of an object's own methods: no reason not to run
            reason = f"looking at it raises {type(error).__name__}"
            entry = Entry(tuple(ranks), "session.run(...)", reason)
        return self._add(entry)

    def pushed(self, ranks: Sequence[int], values: Mapping[str, Any], how: str) -> Entry:
        """Variables of the notebook are about to be set; plain ones are as good as a cell.

        Args:
            ranks: Where.
            values: By name.
            how: ``"push"`` or ``"scatter"``.
        """
        name = f"session.{how}({', '.join(map(str, values))})"
        texts = {key: _literal(value) for key, value in values.items()}
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

    def keep(self, entry: Entry) -> None:
        """An entry has succeeded. The same call many times in succession is one entry."""
        with self._lock:
            entry.succeeded = True
            if len(self._entries) < 2 or self._entries[-1] is not entry:
                return
            last = self._entries[-2]
            if isinstance(entry, Call) and isinstance(last, Call) and _alike(last, entry):
                last.times += 1
                self._entries.pop()

    def clear(self) -> None:
        """The ranks' variables are lost, and with them what earlier entries did."""
        with self._lock:
            self._entries.clear()
            self.forgotten = 0

    def _add(self, entry: Entry) -> Entry:
        with self._lock:
            self._entries.append(entry)
            if len(self._entries) > LIMIT:
                self.forgotten += self._entries.pop(0).succeeded
        return entry


def _alike(last: Call, entry: Call) -> bool:
    return (
        last.succeeded
        and last.function is not None
        and last.function is entry.function
        and (last.ranks, last.arguments, last.needs, last.problem)
        == (entry.ranks, entry.arguments, entry.needs, entry.problem)
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
        text = _literal(value)
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
        _collect(found.source_of, call.needs)
    problems = [each.problem for each in call.needs.values() if each.problem]
    call.problem = problems[0] if problems else ""
    return call


def _collect(item: Any, needs: dict[str, Need]) -> None:
    """Add what a function or class of the notebook uses of the notebook's names."""
    functions = [item] if isinstance(item, FunctionType) else list(vars(item).values())
    for function in functions:
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType):
            continue
        values = function.__globals__
        for name in names_of(function.__code__):
            if name in needs or name not in values:
                continue
            needs[name] = found = need(name, values[name])
            if found.source_of is not None:
                _collect(found.source_of, needs)


def need(name: str, value: Any) -> Need:
    """How a value can be written under a name."""
    if isinstance(value, ModuleType):
        plain = value.__name__ == name
        return Need(f"import {value.__name__}" + ("" if plain else f" as {name}"))
    text = _literal(value)
    if text is not None:
        return Need(f"{name} = {text}")
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module not in (None, "__main__") and _find(str(module), path) is value:
        first, dot, rest = path.partition(".")
        if dot:
            return Need(f"from {module} import {first}\n{name} = {first}.{rest}")
        return Need(f"from {module} import {first}" + ("" if first == name else f" as {name}"))
    if path == "<lambda>" or not isinstance(value, (FunctionType, type)):
        kind = "a lambda" if path == "<lambda>" else f"of type {type(value).__name__}"
        return Need(problem=f"{name} is {kind}")
    if module != "__main__" or "<locals>" in path or getattr(value, "__closure__", None):
        return Need(problem=f"{name} was made within another function")
    return Need(source_of=value)


def _find(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _literal(value: Any) -> str | None:
    """The text of a plain, small value; None for any other."""
    if not _is_plain(value, [200]):
        return None
    text = repr(value)
    return text if len(text) <= TEXT_MAX else None


def _is_plain(value: Any, left: list[int]) -> bool:
    left[0] -= 1
    if left[0] < 0:
        return False
    kind = type(value)
    if kind in (int, bool, type(None)):
        return True
    if kind is float:
        return math.isfinite(value)
    if kind in (str, bytes):
        return len(value) <= TEXT_MAX
    if kind in (list, tuple):
        return all(_is_plain(item, left) for item in value)
    if kind is dict:
        return all(_is_plain(k, left) and _is_plain(v, left) for k, v in value.items())
    return False


@functools.lru_cache(maxsize=512)
def names_of(code: CodeType) -> frozenset[str]:
    """The global names that code reads, also within functions that it defines."""
    return _operands(code, ("LOAD_GLOBAL", "LOAD_NAME"))


@functools.lru_cache(maxsize=512)
def stored_names(code: CodeType) -> frozenset[str]:
    """The names that code declares ``global`` and assigns."""
    return _operands(code, ("STORE_GLOBAL",))


def _operands(code: CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opname in operations}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= _operands(const, operations)
    return frozenset(found)
