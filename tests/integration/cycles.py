"""Sessions started and closed in one process, which must not grow by it.

``python -m tests.integration.cycles --cycles 200`` (``make soak``) does it for long.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from distsession import Session
from tests.integration.conftest import Recorder

CLIENT_EVERY = 5
"""In each of so many cycles ipyparallel's client is used."""
WARM = 2
"""Cycles of each kind after which a process has what it keeps."""
GROWTH = 24 << 20
"""Bytes by which memory may be more than after the first cycles, whatever their number."""


class Left(AssertionError):
    """Something has been left behind."""


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    descriptors: int
    threads: tuple[str, ...]
    children: int
    sockets: int
    folders: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        process = psutil.Process()
        return cls(
            descriptors=process.num_fds(),
            threads=tuple(sorted(thread.name for thread in threading.enumerate())),
            children=len(process.children(recursive=True)),
            sockets=len(process.net_connections(kind="all")),
            folders=len(list(Path(tempfile.gettempdir()).glob("distsession-*"))),
        )

    def exceeds(self, before: Held) -> bool:
        return (
            self.descriptors > before.descriptors
            or len(self.threads) > len(before.threads)
            or self.children > before.children
            or self.sockets > before.sockets
            or self.folders > before.folders
        )


def cycle(*, client: bool) -> None:
    """One session from its start to its end."""
    with Session(2, output=Recorder()) as session:
        session.execute("t = torch.ones(1); dist.all_reduce(t); print(t)")
        if client:
            assert session.client[:].apply_sync(os.getpid) == [info.pid for info in session.infos]


def go(cycles: int) -> tuple[int, int]:
    """Do so many, and look after each.

    Returns:
        Bytes of memory after the first ones, and at the end.
    """
    for client in (True, False) * WARM:
        cycle(client=client)
    time.sleep(0.5)
    before, memory = Held.now(), psutil.Process().memory_info().rss
    for number in range(cycles):
        cycle(client=number % CLIENT_EVERY == 0)
        deadline = time.monotonic() + 10
        while (now := Held.now()).exceeds(before):  # a thread may take a moment to end
            if time.monotonic() > deadline:
                raise Left(f"after {number + 1} cycles more is held than before:\n{before}\n{now}")
            time.sleep(0.05)
    end = psutil.Process().memory_info().rss
    if end - memory > GROWTH:
        raise Left(f"{cycles} cycles took {(end - memory) >> 20} MiB of memory")
    return memory, end


def main() -> int:
    """Run it for long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        memory, end = go(arguments.cycles)
    except Left as error:
        print(error)
        return 1
    print(
        f"{arguments.cycles} cycles in {time.monotonic() - began:.0f} s: {memory >> 20} MiB "
        f"before, {end >> 20} MiB after, nothing else more"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
