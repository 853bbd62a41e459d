"""Tensors between the kernel and a device, beside a copy between it and pinned memory on a rank."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from distsession import Session
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Figure, Row
from tests.gpu import target as targets

MEGABYTES = 256
COPY = "the device's own copy, pinned memory"

SETUP = f"""
import time
on_device = torch.ones({MEGABYTES} << 18, device=device)
pinned = torch.ones({MEGABYTES} << 18, pin_memory=device.type == "cuda")

def seconds(target, source):
    torch.accelerator.synchronize()
    began = time.perf_counter()
    target.copy_(source)
    torch.accelerator.synchronize()
    return time.perf_counter() - began

seconds(pinned, on_device), seconds(on_device, pinned)
"""


def moves(bench: Bench, target: targets.Target) -> Iterator[Row]:
    """Of one rank's, which has the bus for itself."""
    options = {"threads": 1, **target.options}
    if "devices" in options:
        options["devices"] = options["devices"][:1]
    found: dict[str, tuple[list[float], list[float]]] = {"pull": ([], []), "push": ([], [])}
    sent = torch.ones(MEGABYTES << 18)
    with bench.session(1, **options) as session:
        session.execute(SETUP)
        for _ in range(max(bench.repeats, 3) + 1):
            found["pull"][0].append(session.evaluate("seconds(pinned, on_device)")[0])
            found["pull"][1].append(_pull(session))
            found["push"][0].append(session.evaluate("seconds(on_device, pinned)")[0])
            found["push"][1].append(_push(session, sent))
    ways = {"pull": f"{MEGABYTES} MB from a device ({target.backend})"}
    ways["push"] = f"{MEGABYTES} MB to a device ({target.backend})"
    for way, (theirs, mine) in found.items():
        copies, ours = theirs[1:], mine[1:]  # the first time, memory is made
        ratio = Figure(tuple(a / b for a, b in zip(ours, copies, strict=True)))
        yield Row(ways[way], COPY, Figure(tuple(copies)), "s")
        yield Row(ways[way], OURS, Figure(tuple(ours)), "s", ratio, COPY)


def _pull(session: Session) -> float:
    began = time.perf_counter()
    pulled = session.pull("on_device")[0]
    took = time.perf_counter() - began
    if pulled.numel() != MEGABYTES << 18:
        raise RuntimeError(f"{pulled.shape} came from the device")
    return took


def _push(session: Session, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    session.push(sent=tensor)
    session.execute("sent = sent.to(device); torch.accelerator.synchronize()")
    return time.perf_counter() - began
