"""A diagnosis shows what NCCL's RAS service says.

NCCL has that service only where there is a GPU, so a thread of a rank speaks its protocol here.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from distsession import Session
from distsession.display.render import RAS_TITLE
from distsession.engine.process_state import process_state
from distsession.kernel import nccl_ras
from tests.until import until

pytestmark = pytest.mark.timeout(180)

SERVICE = r"""
import socket, threading
heard = []
def serve(listener, answers, tail):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, connection.makefile("rwb") as lines:
            for answer in answers:
                heard.append(lines.readline())
                lines.write(answer)
                lines.flush()
            if answers[-1:] != [b""]:
                continue
            lines.write(tail)
            lines.flush()
if rank == 0:
    listener = socket.create_server(("127.0.0.1", {port}))
    threading.Thread(target=serve, args=(listener, {answers}, {tail}), daemon=True).start()
"""
TAIL = (
    b"NCCL version 2.30.7 compiled with CUDA 13.2\n\nErrors\n======\n\n"
    b"#0-0 (27a079b828ff1a75) MISSING\n"
    b"  1 rank (out of 2) has not replied\n\x1b[31mred\x1b[0m\x07\n\nWarnings\n========\n"
)
GREETING = [b"SERVER PROTOCOL 2\n", b"OK\n", b""]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(2, backend="gloo") as made:
        yield made


def serve(session: Session, monkeypatch: pytest.MonkeyPatch, **how: object) -> None:
    port = free_port()
    facts = {"answers": GREETING, "tail": TAIL} | how
    session.execute(SERVICE.format(port=port, **facts))
    monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{port}")


def test_a_diagnosis_has_the_report(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(session, monkeypatch)
    found = session.diagnose()
    report = repr(found).partition(f"{RAS_TITLE}:\n")[2]
    assert report.startswith("NCCL version 2.30.7")
    assert "1 rank (out of 2) has not replied\nred\n\nWarnings" in report
    assert "\x1b" not in report
    assert "\x07" not in report
    assert "#0-0 (27a079b828ff1a75) MISSING" in found._repr_html_()
    heard = session[0].evaluate("heard")[0]
    assert heard == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 1\n", b"STATUS\n"]


@pytest.mark.parametrize(
    "answers", [[b"HTTP/1.1 400 no\n"], [b"SERVER PROTOCOL 2\n", b"ERROR\n"], [b""]]
)
def test_whoever_else_listens_there_adds_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch, answers: list[bytes]
) -> None:
    serve(session, monkeypatch, answers=answers, tail=b"")
    assert RAS_TITLE not in repr(session.diagnose())


def test_a_service_that_does_not_end_its_answer_is_cut_off(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ras, "TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{listener.getsockname()[1]}")
        began = time.monotonic()
        assert nccl_ras.ras_report("nccl") == ""
        assert time.monotonic() - began >= 1.0


def test_it_is_not_asked_where_it_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_RAS_ADDR", raising=False)
    assert nccl_ras.ras_address("gloo") is None
    assert nccl_ras.ras_address("cpu:gloo,cuda:nccl") == ("localhost", 28028)
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    assert nccl_ras.ras_address("nccl") is None
    monkeypatch.delenv("NCCL_RAS_ENABLE")
    monkeypatch.setenv("NCCL_RAS_ADDR", "[::1]:4000")
    assert nccl_ras.ras_address("nccl") == ("::1", 4000)
    monkeypatch.setenv("NCCL_RAS_ADDR", "nonsense")
    assert nccl_ras.ras_address("nccl") is None
    assert nccl_ras.ras_report("nccl") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is started by root")
@pytest.mark.parametrize("accepts_after", [0, 0.3])
@pytest.mark.parametrize(("user", "expected"), [(0, "so it says"), (65534, "")])
def test_the_service_of_another_user_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, user: int, expected: str, accepts_after: float
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{listener.getsockname()[1]}")
        child = os.fork()
        if not child:
            try:
                os.setuid(user)
                time.sleep(accepts_after)
                connection, _ = listener.accept()
                connection.settimeout(5)
                for answer in (b"SERVER PROTOCOL 2\n", b"OK\n", b"so it says\n"):
                    connection.recv(64)
                    connection.sendall(answer)
            finally:
                os._exit(0)
        try:
            until(lambda: process_state(child) in "SZ", "the process waits")
            assert nccl_ras.ras_report("nccl") == expected
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
