"""What ipyparallel's own command sees of a session, on one host and over hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import pytest

import distsession
from distsession import Session
from tests.integration.host_lab import host_lab
from tests.integration.host_sessions import nothing_left, start
from tests.until import until

pytestmark = pytest.mark.timeout(90)

ROOT = Path(distsession.__file__).parents[1]
KILLED = """
from distsession import Session
with Session(1) as session:
    session.client
    print("ready", flush=True)
    import time; time.sleep(600)
"""


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's default profile."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return tmp_path / "profile_default"


def ipcluster(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ipyparallel.cluster", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ipcluster("list", "-o", "json"))
    return found


def engines(cluster: dict[str, Any]) -> int:
    return sum(each["n"] for each in cluster["engines"]["sets"].values())


def files(profile: Path) -> list[Path]:
    return list((profile / "security").glob("cluster-*.json"))


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(2) as session:
        yield session


def test_a_session_is_listed_from_its_first_client_to_its_end(
    profile: Path, session: Session
) -> None:
    assert files(profile) == []
    _ = session.client
    (file,) = files(profile)
    assert file.stat().st_mode & 0o077 == 0
    (cluster,) = listed()
    assert engines(cluster) == 2
    assert "controller" in cluster
    session.close()
    assert files(profile) == []
    assert listed() == []


def test_others_connect_to_it_by_its_name(session: Session) -> None:
    session.execute("value = rank + 1")
    _ = session.client
    (cluster,) = listed()
    name = cluster["cluster"]["cluster_id"]
    client = ipyparallel.Cluster.from_file(cluster_id=name).connect_client_sync()
    with client:
        assert client[:]["value"] == [1, 2]


def test_ipcluster_stop_ends_the_ranks_and_a_restart_brings_them_back(
    profile: Path, session: Session
) -> None:
    _ = session.client
    (cluster,) = listed()
    ipcluster("stop", f"--cluster-id={cluster['cluster']['cluster_id']}")
    until(lambda: "its agent is gone" in session.status(), "the session's word on it")
    assert files(profile) == []
    session.restart()
    assert session.client.ids == [0, 1]
    assert len(listed()) == 1


def test_what_a_killed_kernel_has_left_goes_with_the_next_look_or_client(
    profile: Path, session: Session
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    ) as kernel:  # fmt: skip
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "ready\n"
        (stale,) = files(profile)
        folder = json.loads(stale.read_text())["cluster"]["profile_dir"]
        kernel.send_signal(signal.SIGKILL)
    until(lambda: not os.path.exists(folder), "the end of what it had")
    _ = session.client
    (own,) = files(profile)
    assert own != stale


def test_a_session_over_hosts_is_listed_and_stopped_as_well(profile: Path) -> None:
    with host_lab(("gpu1", "gpu2")) as lab:
        with start(lab, "gpu1", "gpu2", ranks_per_host=[1, 2]) as session:
            _ = session.client
            (cluster,) = listed()
            assert engines(cluster) == 3
            ipcluster("stop", f"--cluster-id={cluster['cluster']['cluster_id']}")
            until(lambda: "its agent is gone" in session.status(), "the session's word on it")
            assert files(profile) == []
        nothing_left(lab)
