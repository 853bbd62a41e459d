"""Processes that play the agent of a session that is kept, for tests that need no ranks.

Each holds the lock of its folder, as an agent does, and listens where an agent listens. It answers
``EndSession`` by removing the folder and ending.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from distsession.cluster.kept import KeptSession, write_kept
from distsession.protocol import folder_lock
from distsession.protocol.board import REQUEST, SINCE, Board, file_size, make_file
from distsession.protocol.kept_record import OWNER_FILE, write_record

__all__ = ["PlayedAgent", "write_owner"]

PROGRAM = """
import os, signal, sys, time
from multiprocessing.connection import Listener
from distsession.protocol import folder_lock
from distsession.protocol.attach import EndSession, Ended, attach_path
from distsession.engine.log_file import log_path
from distsession.engine.process import die_with_parent, redirect_standard_streams
folder, node, answer, *ranks = sys.argv[1:]
lock = folder_lock.hold(folder)
agent, heard = os.getpid(), os.pipe()
for rank in map(int, ranks):
    if not os.fork():
        os.setsid()
        die_with_parent(agent)
        redirect_standard_streams(*(log_path(folder, rank, 0, each) for each in ("out", "err")))
        print(f"rank {rank} is here", flush=True)
        print(f"rank {rank} complains", file=sys.stderr, flush=True)
        os.write(heard[1], b".")
        signal.pause()
for _ in ranks:
    os.read(heard[0], 1)
with Listener(attach_path(folder, int(node)), family="AF_UNIX") as listener:
    print("ready", flush=True)
    while True:
        with listener.accept() as link:
            message = link.recv()
            if isinstance(message, EndSession) and answer == "ends":
                link.send(Ended())
                print(message.reason, flush=True)
                break
            if answer == "closes":
                continue
            if answer == "is ending":
                break
            sys.stdin.read()  # says nothing
if answer == "is ending":
    time.sleep(0.5)
folder_lock.remove_unused(folder, lock, lambda: True)
"""


class PlayedAgent:
    """A session's folder, and a process that plays its agent.

    Args:
        base: Where the folder is made.
        name: Of the session.
        answer: ``"ends"`` if it does as it is told, ``"closes"`` if it hangs up, ``"waits"`` if it
            says nothing, ``"is ending"`` if it hangs up and ends a moment later.
        nodes: How many agents are played.
        has_ranks: It has a child for each rank, which has written a line to each log file.
        more: Of ``write_kept``.
    """

    def __init__(
        self,
        base: Path,
        name: str | None = "digits",
        *,
        answer: str = "ends",
        folder: str = "one",
        nodes: int = 1,
        has_ranks: bool = False,
        **more: Any,
    ):
        self.folder = base / f"{folder_lock.PREFIX}{folder}"
        self.folder.mkdir(mode=0o700)
        lock = folder_lock.make(str(self.folder))
        (self.folder / "logs").mkdir()
        world_size = more.pop("world_size", 2)
        file = make_file()
        os.ftruncate(file, file_size(world_size))
        self.board = Board(file, world_size)
        ranks = list(map(str, range(world_size))) if has_ranks else []
        try:
            self.agents = [
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(self.folder), str(node), answer, *ranks],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[file],
                )
                for node in range(nodes)
            ]  # fmt: skip
            for agent in self.agents:
                assert agent.stdout is not None
                assert agent.stdout.readline() == "ready\n"
        finally:
            folder_lock.release(lock)
            os.close(file)
        given = {"keep_s": 60.0, "keep_idle_s": 0.0, "keep_output_bytes": 1 << 20, **more}
        self.kept: KeptSession = write_kept(
            str(self.folder),
            name=name,
            world_size=world_size,
            nodes=nodes,
            backend="gloo",
            agents=[agent.pid for agent in self.agents],
            board=f"/proc/{self.agents[0].pid}/fd/{file}",
            **given,
        )

    def write(self, **changes: Any) -> None:
        """Change what stands in ``session.json``, also to what nobody would write."""
        path = self.folder / "session.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def run(self, rank: int, seconds: float = 0.0, request: int = 1) -> None:
        """Have a rank run something, for as long."""
        start = self.board.regions[rank].start
        self.board.words[start + SINCE] = time.monotonic_ns() - round(seconds * 1e9)
        self.board.words[start + REQUEST] = request

    def said(self) -> str:
        """The reason for which it was ended."""
        stdout = self.agents[0].stdout
        assert stdout is not None
        return stdout.readline().rstrip("\n")

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait(timeout=60)
            for pipe in (agent.stdin, agent.stdout):
                assert pipe is not None
                pipe.close()

    def close(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        self.board.close()
        folder_lock.remove(str(self.folder))

    def __enter__(self) -> PlayedAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_owner(folder: Path, **facts: Any) -> None:
    """Write ``owner.json``."""
    known = {"epoch": 1, "pid": os.getpid(), "since": time.time(), "gone_at": None}
    write_record(str(folder), OWNER_FILE, {**known, "lease_ends_at": None, **facts})
