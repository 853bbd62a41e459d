"""Nested containers as lists of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["is_container", "leaves", "rebuilt"]


def is_container(value: object) -> bool:
    """Whether it is looked into: a dict, a list or a tuple, named tuples included."""
    return isinstance(value, Mapping | list | tuple)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a nested container holds, with the path to it, in an order that all ranks share.

    Mappings are taken in the order of their keys' texts: that in which keys were added may differ
    between ranks.
    """
    if isinstance(value, Mapping):
        for key in _ordered(value):
            yield from leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def rebuilt(value: Any, take: Callable[[], Any]) -> Any:
    """A container like this one that holds what ``take`` gives, in the order of ``leaves``."""
    if isinstance(value, Mapping):
        new = {key: rebuilt(value[key], take) for key in _ordered(value)}
        in_order = {key: new[key] for key in value}
        return in_order if type(value) is dict else _like(value, in_order)
    if isinstance(value, list | tuple):
        items = [rebuilt(item, take) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return take()


def _ordered(value: Mapping[Any, Any]) -> list[Any]:
    return sorted(value, key=lambda key: (type(key).__name__, repr(key)))


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same class where it can be copied and filled, otherwise a dict."""
    copy = getattr(value, "copy", None)
    new = copy() if callable(copy) else None
    if new is None or not hasattr(new, "update"):
        return items
    new.update(items)
    return new
