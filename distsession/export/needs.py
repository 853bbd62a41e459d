"""What functions of a notebook use of it, and how that is written."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import math
import sys
import textwrap
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["Need", "collect", "literal", "names_of", "need", "resolved", "stored_names"]

TEXT_MAX = 2000
"""Characters of a value that is written as text."""


@dataclass(frozen=True)
class Need:
    """A value of the notebook that a function uses.

    Attributes:
        text: The statement that makes it; empty if its source has to be looked up.
        source_of: A function or class of the notebook.
        problem: Why it cannot be written.
        source: The source of a function or class, once it has been looked up.
        stores: The names that this function declares ``global`` and assigns.
    """

    text: str = ""
    source_of: Any = None
    problem: str = ""
    source: str = ""
    stores: frozenset[str] = frozenset()


def collect(item: Any, needs: dict[str, Need]) -> None:
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
                collect(found.source_of, needs)


def need(name: str, value: Any) -> Need:
    """How a value can be written under a name."""
    if isinstance(value, ModuleType):
        plain = value.__name__ == name
        return Need(f"import {value.__name__}" + ("" if plain else f" as {name}"))
    text = literal(value)
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


def literal(value: Any) -> str | None:
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


# --- sources --------------------------------------------------------------------------------------


def resolved(needs: Mapping[str, Need]) -> dict[str, Need]:
    """The same as text alone, which nothing of this process is needed for any more.

    With the source of each function and class, and with what their definitions use themselves:
    decorators, defaults, annotations.
    """
    found: dict[str, Need] = {}
    todo = list(needs.items())
    known = set(needs)
    for name, each in todo:  # which grows meanwhile
        item = each.source_of
        if item is None:
            found[name] = each
            continue
        source, outside = _source(item)
        if not source:
            problem = f"the source of {item.__qualname__} is not known"
            found[name] = Need(problem=problem)
            continue
        is_function = inspect.isfunction(item)
        stores = stored_names(item.__code__) if is_function else frozenset[str]()
        found[name] = Need(source=source, stores=stores)
        values = getattr(item, "__globals__", None) or vars(sys.modules["__main__"])
        for more in outside:
            if more in values and more not in known and not more.startswith("__"):
                known.add(more)
                todo.append((more, need(more, values[more])))
    return found


_sources: weakref.WeakKeyDictionary[Any, tuple[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def _source(item: Any) -> tuple[str, tuple[str, ...]]:
    """The source of a function or class, and the names that its definition looks up.

    Empty if it is not known.
    """
    try:
        return _sources[item]
    except (KeyError, TypeError):  # a class may forbid to be hashed
        pass
    try:
        text = inspect.getsource(item) if inspect.isfunction(item) else _class_source(item)
        text = textwrap.dedent(text).strip("\n")
        names = tuple(sorted(set(_names_of_definition(ast.parse(text)))))
    except (OSError, TypeError, SyntaxError):
        text, names = "", ()
    with contextlib.suppress(TypeError):
        _sources[item] = text, names
    return text, names


def _names_of_definition(node: ast.AST) -> Iterator[str]:
    """The names that are looked up when a function or class is defined, not when it is called."""
    if isinstance(node, ast.Name):
        yield node.id
    for name, child in ast.iter_fields(node):
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _names_of_definition(each)


def _class_source(item: type) -> str:
    """The source of a class; ``inspect`` does not find that of a class of a notebook.

    Raises:
        OSError: It is not to be found.
    """
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(item)
    for method in vars(item).values():
        if not inspect.isfunction(method):
            continue
        lines, _ = inspect.findsource(method)
        first = method.__code__.co_firstlineno
        for node in ast.walk(ast.parse("".join(lines))):
            last = getattr(node, "end_lineno", 0)
            if isinstance(node, ast.ClassDef) and node.name == item.__name__:
                begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if begin <= first <= last:
                    return "".join(lines[begin - 1 : last])
    raise OSError(item.__qualname__)
