"""Classes of ours that stand for torch's have their public members, with the same defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distsession.engine.collectives.group import SwappableGroup
from distsession.engine.collectives.work import AnySourceWork, IssuedWork
from distsession.engine.rendezvous import _NativeUserStore, _UserStore
from distsession.engine.store import Store, StorePart

PAIRS = [
    (SwappableGroup, dist.ProcessGroup),
    (IssuedWork, dist.Work),
    (AnySourceWork, dist.Work),
    (Store, dist.Store),
    (StorePart, dist.PrefixStore),
    (_UserStore, dist.PrefixStore),
    (_UserStore, dist.TCPStore),
    (_NativeUserStore, dist.TCPStore),
]
BY_BASE = {
    SwappableGroup: {
        "_id": "a number of this object",
        "_register_backend": "ours has its backends within",
        "_set_default_backend": "ours has its backends within",
        "bound_device_id": "torch sets it on each group",
        "boxed": "this object, for C++",
        "get_reconfigure_handle": "a session connects its groups anew by itself",
        "merge_remote_group": "no backend of a session merges groups",
        "rank": "given to the base",
        "reconfigure": "a session connects its groups anew by itself",
        "size": "given to the base",
        "unbox": "this object, from C++",
    },
    IssuedWork: {"unbox": "this object, from C++"},
    AnySourceWork: {
        "_get_duration": "gloo has none",
        "_get_sequence_number": "it has none before it has found who sends",
        "block_current_stream": "gloo waits on the CPU",
        "exception": "it is raised by wait",
        "get_future": "gloo has none for a receive",
        "get_future_result": "gloo has none",
        "is_success": "as gloo's",
        "result": "gloo has none for a receive",
        "synchronize": "gloo waits on the CPU",
        "timeout": "gloo has none for a receive",
        "unbox": "this object, from C++",
    },
    Store: {
        "barrier": "made of add and wait",
        "set_timeout": "the base keeps it",
        "timeout": "the base keeps it",
    },
}
"""Members that torch's own class has to do, and why it can; a part of a store passes all on."""
BUILTINS = {"timedelta": timedelta, "datetime": __import__("datetime"), "torch": torch}

Parameter = tuple[str, str]


def public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("__") and "pybind11" not in name]


def is_ours(kind: type, name: str) -> bool:
    return any(name in vars(c) for c in kind.__mro__ if c.__module__.startswith("distsession."))


def parts(text: str) -> Iterator[str]:
    """What stands between commas that are in no brackets."""
    depth, part = 0, ""
    for char in text:
        depth += (char in "[(<") - (char in "])>")
        if char == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += char
    if part.strip():
        yield part.strip()


def overloads(kind: type, name: str) -> list[list[Parameter]]:
    """The parameters of each way to call a method of torch's: names and defaults as text.

    pybind11 says them in the docstring: ``1. wait(self: Store, arg0: list[str], ...) -> None``.
    """
    lines = (getattr(kind, name).__doc__ or "").replace("->", "\x00").splitlines()
    found = []
    for line in lines:
        if match := re.fullmatch(rf"(?:\d+\. )?{re.escape(name)}\((self: .*)\) \x00 .*", line):
            parameters = []
            for part in list(parts(match[1]))[1:]:
                declared, _, default = part.partition(" = ")
                parameters.append((declared.partition(":")[0], default))
            found.append(parameters)
    return found


def methods() -> list[Any]:
    return [
        pytest.param(ours, torchs, name, id=f"{ours.__name__}-{torchs.__name__}-{name}")
        for ours, torchs in PAIRS
        for name in public(torchs)
        if inspect.isroutine(getattr(ours, name, None)) and is_ours(ours, name)
    ]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_every_public_member_is_there(ours: type, torchs: type) -> None:
    assert [name for name in public(torchs) if not hasattr(ours, name)] == []


@pytest.mark.parametrize("ours", BY_BASE)
def test_what_the_base_does_is_looked_through_one_by_one(ours: type) -> None:
    base = dist.Work if issubclass(ours, dist.Work) else ours.__mro__[1]
    if issubclass(ours, dist.ProcessGroup):
        base = dist.ProcessGroup
    constants = {n for n in public(base) if isinstance(vars(base).get(n), (type, int))}
    constants |= set(base.BackendType.__members__) if base is dist.ProcessGroup else set()
    left = {name for name in public(base) if not is_ours(ours, name)} - constants
    assert left <= set(BY_BASE[ours])


@pytest.mark.parametrize(("ours", "torchs", "name"), methods())
def test_a_method_takes_what_torchs_takes(ours: type, torchs: type, name: str) -> None:
    signature = inspect.signature(getattr(ours, name))
    for parameters in overloads(torchs, name):
        required = [each for each, default in parameters if not default]
        signature.bind(None, *required)
        signature.bind(None, *[each for each, _ in parameters if each != "*"])
        named = {each: each for each, _ in parameters if each != "*"}
        if not any(re.fullmatch(r"arg\d+", each) for each in named):
            signature.bind(None, **named)
        for each, default in parameters:
            if default and each in signature.parameters and "object at" not in default:
                own = signature.parameters[each].default
                if default != "None" and own is not None:
                    assert own == eval(default, dict(BUILTINS))
                assert own is not inspect.Parameter.empty


def test_the_docstrings_of_torchs_methods_are_read() -> None:
    """Or nothing would be compared."""
    found = overloads(dist.ProcessGroup, "reduce")
    assert [[name for name, _ in each][:3] for each in found] == [  # torch 2.8 has no timeout
        ["tensors", "opts"],
        ["tensor", "root", "op"],
    ]
    assert overloads(dist.Work, "wait") == [[("timeout", "datetime.timedelta(0)")]]
    assert len(methods()) > 60
