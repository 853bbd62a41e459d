"""The backends that a test of sessions runs on.

A test that takes the fixture ``backend``, or a session of it, runs once on each. ``gloo`` does its
work on the CPU; ``standin`` gives it to a device, as NCCL does (see ``tests.standin``). Ranks of
the second have tensors made on their device unless a program says otherwise, so that programs are
the same. The parameter says what differs in what a test may assume.

``standin2`` and ``standin-lazy`` play the other classes that NCCL has, from torch 2.15 on. Each
runs a part of these tests, always the same, for all would take minutes more: see ``is_chosen``.
``DISTSESSION_BACKENDS=gloo,standin2,nccl`` names backends that run them all. NCCL needs a GPU,
which all ranks share.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from distsession import Session

__all__ = [
    "BACKENDS",
    "GLOO",
    "LEAVES_MESSAGE",
    "STANDIN",
    "STANDIN2",
    "STANDIN_LAZY",
    "Backend",
    "Place",
    "only",
    "places",
]


@dataclass(frozen=True)
class Backend:
    """A backend, and what a test may assume of it.

    Attributes:
        name: As ``Session(backend=...)`` takes it.
        device: The type of the ranks' devices.
        preload: What its sessions import before the ranks are forked.
        is_device: An operation is given to the device, and the call that does so returns. Its
            outcome is waited for elsewhere, and a mismatch is seen by who comes last, when others
            may have begun.
        is_shared: All ranks are on the first device.
        break_device: Code that breaks the current device for the rest of the process.
    """

    name: str
    device: str = "cpu"
    preload: tuple[str, ...] = ()
    is_device: bool = False
    is_shared: bool = False
    break_device: str = ""

    def program(self, code: str) -> str:
        """A program whose lines that end with ``; FINISH`` wait for what they have called."""
        return code.replace("; FINISH", "; torch.accelerator.synchronize()" * self.is_device)

    def waits(self, ranks: int = 1) -> str:
        """How a sentence says that so many ranks wait within an operation: ``waits in``."""
        wait, whose = ("waits", "its") if ranks == 1 else ("wait", "their")
        return f"{wait} for {whose} device in" if self.is_device else f"{wait} in"

    def options(self, ranks: int | None = None) -> dict[str, Any]:
        """Those of a session with so many ranks."""
        options: dict[str, Any] = {"backend": self.name}
        if self.preload:
            options["preload"] = self.preload
        if self.is_shared and ranks:
            options["devices"] = [0] * ranks
        return options

    def session(self, ranks: int, **options: Any) -> Session:
        """Start a session on it."""
        return Session(ranks, **self.options(ranks) | options)

    def why_not(self) -> str | None:
        """Why it cannot be had on this machine, or None."""
        if self.device == "standin":
            return _why_no_standin()
        if self.name == "nccl":
            return _why_no_nccl()
        return None

    def __str__(self) -> str:
        return self.name


GLOO = Backend("gloo")
STANDIN = Backend(
    "standin",
    device="standin",
    preload=("tests.standin.register", "tests.standin.ipc", "tests.on_device"),
    is_device=True,
    break_device="torch.standin._break()",
)
STANDIN2 = replace(STANDIN, name="standin2")
"""As NCCL's class of torch 2.15: it connects when it is made, and binds its group to a device."""
STANDIN_LAZY = replace(STANDIN, name="standin-lazy")
"""As that, with a communicator for each pair of ranks that send to each other."""
NCCL = Backend(
    "nccl",
    device="cuda",
    preload=("tests.on_device",),
    is_device=True,
    is_shared=True,
    # An index out of range ends all work of the process on its GPU.
    break_device="torch.zeros(4)[torch.full((1,), 99)].sum().item()",
)

_ALL = {backend.name: backend for backend in (GLOO, STANDIN, STANDIN2, STANDIN_LAZY, NCCL)}
_CHOSEN = os.environ.get("DISTSESSION_BACKENDS")
_ONE_IN = {} if _CHOSEN else {STANDIN2: 4, STANDIN_LAZY: 4}
"""On these backends one test in so many runs, and each that is marked ``whole_on_each_backend``."""
BACKENDS = tuple(
    _ALL[name] for name in (_CHOSEN or "gloo,standin,standin2,standin-lazy").split(",")
)


@dataclass(frozen=True)
class Place:
    """A backend, a number of ranks, and how many nodes this machine plays."""

    backend: Backend
    ranks: int
    nodes: int = 1

    def session(self, ranks: int | None = None, **options: Any) -> Session:
        """Start a session there."""
        return self.backend.session(ranks or self.ranks, **{"nodes": self.nodes} | options)


def places(**ranks: Iterable[int]) -> list[Any]:
    """Parameters of a fixture: the numbers of ranks that each backend is tried with.

    Args:
        **ranks: By the name of the backend. NCCL and the other classes of the stand-in are tried
            with those of ``standin``.
    """
    for name in ("standin2", "standin-lazy", "nccl"):
        ranks.setdefault(name, ranks.get("standin", ()))
    return [
        pytest.param(Place(backend, count), id=f"{backend}, {count} ranks")
        for backend in BACKENDS
        for count in ranks.get(backend.name, ())
    ]


def only(name: str, why: str) -> pytest.MarkDecorator:
    """Limit a test to one backend.

    Args:
        name: Which; ``"device"`` for all that give their work to a device.
        why: Not to the others.
    """
    return pytest.mark.only_backend(name, why)


LEAVES_MESSAGE = pytest.mark.leaves_message
"""Marks a test that leaves a message which nobody takes. With ``standin-lazy`` the rank that waits
for it has to be replaced, as ``test_classes`` shows, so such a test does not run there."""


def is_chosen(item: pytest.Item) -> bool:
    """Whether a test runs on the backend that it is given, or only if that is asked for."""
    if item.get_closest_marker("whole_on_each_backend"):
        return True
    number = zlib.crc32(item.name.encode())
    parts = [_ONE_IN[backend] for backend in _given(item) if backend in _ONE_IN]
    return all(number % part == 0 for part in parts)


def _given(item: pytest.Item) -> Iterator[Backend]:
    """The backends among a test's parameters."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        backend = value.backend if isinstance(value, Place) else value
        if isinstance(backend, Backend):
            yield backend


def check_can_run(item: pytest.Item) -> None:
    """Skip a test that is for another backend than that which it is given, or that cannot run."""
    for backend in _given(item):
        for mark in item.iter_markers("only_backend"):
            name, why = mark.args
            if backend.name != name and not (name == "device" and backend.is_device):
                pytest.skip(f"not on {backend}: {why}")
        if backend is STANDIN_LAZY and item.get_closest_marker("leaves_message"):
            pytest.skip("its class cannot end a message that nobody takes")
        if reason := backend.why_not():
            pytest.skip(reason)


@cache
def _why_no_standin() -> str | None:
    from tests.standin import build

    reason = build.why_not()
    if reason and os.environ.get("DISTSESSION_STANDIN") == "required":
        pytest.fail(f"DISTSESSION_STANDIN=required, but {reason}")
    return reason


@cache
def _why_no_nccl() -> str | None:
    import torch

    from distsession.engine.host_info import nccl_version

    if not torch.cuda.is_available():
        return "there is no GPU"
    if nccl_version() < (2, 30):
        return "several ranks on one GPU need NCCL 2.30"
    return None
