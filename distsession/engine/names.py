"""What a dotted name stands for among a rank's variables, without running anything.

A name is followed by looking into dictionaries, lists, modules, and the attributes that objects
store.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Mapping
from functools import cached_property
from types import (
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

__all__ = ["Missing", "children", "find", "has_own", "is_foreign", "module_type", "require_stored"]


class Missing(Exception):
    """A name that leads nowhere, or only by running something."""


def find(expression: str, namespace: Mapping[str, Any]) -> Any:
    """What a dotted name stands for.

    Raises:
        Missing: It stands for nothing, or something would have to run to know it.
    """
    try:
        node = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise Missing from error
    return _follow(node, namespace)


def _follow(node: ast.AST, namespace: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name) if name in namespace:
            return namespace[name]
        case ast.Name(id=name) if hasattr(builtins, name):
            return getattr(builtins, name)
        case ast.Attribute(value=inner, attr=name):
            return _attribute(require_stored(_follow(inner, namespace)), name)
        case ast.Subscript(value=inner, slice=key):
            return _item(require_stored(_follow(inner, namespace)), key)
    raise Missing


def require_stored(value: Any) -> Any:
    """A value that can be looked into; not what would have to be computed first."""
    if isinstance(value, (property, GetSetDescriptorType, MemberDescriptorType, cached_property)):
        raise Missing
    return value


def _item(value: Any, key: ast.AST) -> Any:
    try:
        wanted = ast.literal_eval(key)
        if isinstance(value, module_type()):
            held = children(value)
            return held[wanted] if isinstance(wanted, str) else [*held.values()][wanted]
        if has_own(value, "__getitem__", (dict,)):
            found = dict.get(value, wanted, Missing)  # never makes what is missing
            if found is not Missing:
                return found
        elif has_own(value, "__getitem__", (list, tuple)):
            return value[wanted]
    except Exception as error:
        raise Missing from error
    raise Missing


def has_own(value: Any, method: str, kinds: tuple[type, ...]) -> bool:
    """Whether a method of a builtin type is the one that a value has."""
    return any(
        isinstance(value, kind) and getattr(type(value), method) is getattr(kind, method)
        for kind in kinds
    )


def _attribute(value: Any, name: str) -> Any:
    held = children(value)
    if name in held:
        return held[name]
    try:
        found = inspect.getattr_static(value, name)
    except AttributeError as error:
        raise Missing from error
    if isinstance(value, (type, ModuleType)):
        return getattr(found, "__func__", found)
    match found:
        case FunctionType():
            return MethodType(found, value)
        case classmethod():
            return MethodType(found.__func__, type(value))
        case staticmethod():
            return found.__func__
        case GetSetDescriptorType() | MemberDescriptorType() if not is_foreign(value):
            try:
                return found.__get__(value)
            except Exception as error:
                raise Missing from error
    return found


def is_foreign(value: Any) -> bool:
    """Whether what its attributes compute may take long or wait, as with a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def module_type() -> Any:
    """Torch's modules, for ``isinstance``; nothing is one where torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch.nn.Module if torch is not None else ()


def children(value: Any) -> dict[str, Any]:
    """What a torch module holds beside its attributes."""
    if isinstance(value, type) or not isinstance(value, module_type()):
        return {}
    held = vars(value)
    return {
        name: item
        for kind in ("_parameters", "_buffers", "_modules")
        for name, item in (held.get(kind) or {}).items()
    }
