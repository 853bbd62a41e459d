"""Real sessions, and a place for their output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jupyter_client.provisioning import local_provisioner

from distsession import Session
from distsession.cluster import agents
from distsession.kernel.output import Notice, Output
from distsession.protocol.messages import Display, Text
from tests.warm_agents import STARTED, WarmProcess, fork_agents, fork_agents_of_kernels


class Recorder(Output):
    """Keeps what the ranks put out."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.shown: list[dict[int, Any]] = []
        self.notices: list[str] = []
        self.remarks: list[str] = []

    def __call__(self) -> Recorder:
        return self

    def write(self, message: Any) -> None:
        self.messages.append(message)

    def tick(self, reports: Any) -> None:
        pass

    def show(self, shown: dict[int, Any]) -> None:
        self.shown.append(shown)

    def notify(self, notice: Notice) -> None:
        self.notices.append(notice.text)

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def close(self) -> None:
        pass

    def clear(self) -> None:
        self.notices.clear()
        self.messages.clear()
        self.shown.clear()

    def text(self, rank: int, stream: str = "stdout") -> str:
        return "".join(
            m.text
            for m in self.messages
            if isinstance(m, Text) and m.rank == rank and m.stream == stream
        )

    def displays(self, rank: int) -> list[Display]:
        return [m for m in self.messages if isinstance(m, Display) and m.rank == rank]


@pytest.fixture(scope="session", autouse=True)
def _warm_agents(warm: WarmProcess) -> Iterator[None]:
    """Sessions of this process, and of kernels, start with agents that have imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((agents, "start_process"), (local_provisioner, "launch_kernel")):
            patch.setattr(module, name, getattr(module, name))
        fork_agents(agents, warm)
        fork_agents_of_kernels(local_provisioner, warm)
        yield


@pytest.fixture
def cold_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test agents import torch, as users' do, also those of kernels."""
    monkeypatch.setenv(STARTED, "1")


@pytest.fixture(scope="module")
def _shared() -> Iterator[tuple[Session, Recorder]]:
    recorder = Recorder()
    with Session(2, output=recorder) as session:
        yield session, recorder


@pytest.fixture
def session(_shared: tuple[Session, Recorder]) -> Session:
    """Two ranks that the tests of a module share."""
    session, recorder = _shared
    recorder.clear()
    return session


@pytest.fixture
def output(_shared: tuple[Session, Recorder]) -> Recorder:
    """What the shared session's ranks put out."""
    return _shared[1]


@pytest.fixture
def start() -> Iterator[Callable[..., Session]]:
    """Start sessions of a test's own; they are closed after it."""
    sessions: list[Session] = []

    def make(*args: Any, **kwargs: Any) -> Session:
        sessions.append(Session(*args, **kwargs))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()
