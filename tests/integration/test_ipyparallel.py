"""ipyparallel beside our own channel: the same engines, the same variables.

These tests lean on what ``engine/entry`` and ``cluster/controller`` know of ipyparallel's and
ipykernel's inside. They are the ones that a new release of either breaks first.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import ipyparallel
import pytest

from distsession import Session
from distsession.cluster import ipyparallel as beside

from .conftest import Recorder


def test_the_client_knows_each_rank_by_its_number(session: Session) -> None:
    client = session.client
    assert client is session.client
    assert client.ids == [0, 1]
    pids = client[:].apply_sync(os.getpid)
    assert pids == [info.pid for info in session.infos]


def test_variables_are_shared(session: Session) -> None:
    session.execute("ours = rank * 10")
    view = session.client[:]
    assert view["ours"] == [0, 10]
    view.execute("theirs = rank + 5", block=True)
    assert list(session.evaluate("theirs").values()) == [5, 6]
    view.push({"pushed": 3}, block=True)
    assert session.evaluate("pushed")[0] == 3


def test_output_of_px_goes_to_ipyparallel_and_ours_to_us(
    session: Session, output: Recorder
) -> None:
    result = session.client[:].execute("print('px', rank)", block=True)
    assert result.stdout == ["px 0\n", "px 1\n"]
    assert "px" not in output.text(0)
    session.execute("print('ours')")
    assert output.text(1) == "ours\n"
    reply = session.client[0].execute("1 + 1", silent=False, block=True).get()
    assert reply.execute_result["data"]["text/plain"] == "2"


def test_a_new_client_loses_no_output_of_its_first_request(session: Session) -> None:
    one = session.launcher._registration.controller
    for number in range(30):  # one in six lost something before the client waited for its output
        if one._client is not None:
            one._client.close()
            one._client = None
        result = session.client[:].execute(f"print({number})", silent=False, block=False)
        result.wait(30)
        assert result.wait_for_output(30)
        assert result.stdout == [f"{number}\n"] * 2


def test_a_new_client_knows_all_ranks_though_it_misses_their_registration(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "HEARTBEAT_MS", 1500)  # so that ranks register late
    monkeypatch.setattr(ipyparallel.Client, "_register_engine", lambda self, message: None)
    session = start(2)
    assert session.client.ids == [0, 1]


def test_displays_of_px_go_to_ipyparallel(session: Session, output: Recorder) -> None:
    result = session.client[:].execute(
        "from IPython.display import HTML, display; display(HTML('<b>px</b>'))", block=True
    )
    assert [o["data"]["text/html"] for o in result.outputs[0]] == ["<b>px</b>"]
    assert output.displays(0) == []


def test_an_error_of_px_arrives(session: Session) -> None:
    with pytest.raises(Exception, match="division"):
        session.client[:].execute("1 / 0", block=True)
    assert session.evaluate("rank")[1] == 1


def test_the_namespace_has_no_names_of_ipyparallel(session: Session) -> None:
    session.client[:].apply_sync(os.getpid)
    names = session.evaluate("[n for n in globals() if not n.startswith('_')]")[0]
    assert {"torch", "dist", "rank", "local_rank", "world_size", "device"} <= set(names)
    known = {"In", "Out", "exit", "quit", "open", "get_ipython"}
    assert set(names) - known - {"ours", "theirs", "pushed", "HTML", "display"} == {
        "torch", "dist", "rank", "local_rank", "world_size", "device",
    }  # fmt: skip


def test_ids_are_ranks_after_restarts_too(start) -> None:
    session = start(2)
    assert session.client.ids == [0, 1]
    for ranks in (None, [1], None):
        session.restart(ranks)
        client = session.client
        assert client[:].apply_sync(os.getpid) == [info.pid for info in session.infos]
        assert client.ids == [0, 1]


def test_a_rank_that_died_is_known_again_after_restart(start) -> None:
    session = start(2)
    assert session.client.ids == [0, 1]
    os.kill(session.infos[1].pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while "dead" not in session.status() and time.monotonic() < deadline:
        time.sleep(0.01)
    session.restart([1])
    assert session.client[:].apply_sync(os.getpid) == [info.pid for info in session.infos]


def test_the_end_of_the_controller_leaves_the_ranks_alone(start) -> None:
    session = start(2)
    session.execute("kept = 1")
    session.client  # noqa: B018
    os.killpg(session.launcher._registration.controller._cluster.controller.pid, signal.SIGKILL)
    time.sleep(1.0)
    assert list(session.evaluate("kept").values()) == [1, 1]


def test_the_client_waits_for_a_busy_rank_no_longer_than_it_says(start) -> None:
    session = start(1)
    future = session.submit(time.sleep, 1.0)
    assert session.client.ids == [0]  # registers as soon as the run is over
    assert future.done()
