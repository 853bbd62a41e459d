"""Where folders of sessions are made, and places that are passed over as others could act there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsession.cli import machine
from distsession.cluster import kept
from distsession.cluster.folder import PrivateFolder
from distsession.cluster.hosts import Hosts
from distsession.engine.host_session import HostSession, Order
from distsession.errors import KeptSessionError, LaunchError
from distsession.host_plan import HostPlan
from distsession.protocol import places
from tests.strangers import NOBODY

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path of this user's own."""
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def unsafe(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR, in a folder in which everybody may rename."""
    base.chmod(0o777)
    place = base / "mine"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (0o700, ""), (0o755, ""), (0o1777, ""), (0o1770, ""),
        (0o777, "everybody may rename"), (0o770, "its group may rename"), (0o702, "everybody"),
    ],
)  # fmt: skip
def test_a_place_in_which_others_may_rename_is_named(base: Path, mode: int, says: str) -> None:
    base.chmod(mode)
    for place in (base, base / "below", base / "below" / "more"):
        place.mkdir(mode=0o700, exist_ok=True)
        why = places.problem(str(place))
        assert (says in why and str(base) in why) if says else not why


@root_only
def test_a_place_below_a_folder_of_another_user_is_named(base: Path) -> None:
    place = base / "mine"
    place.mkdir(mode=0o700)
    os.chown(base, NOBODY, NOBODY)
    assert f"is another user's (uid {NOBODY})" in places.problem(str(place))
    os.chown(base, 0, 0)


def test_a_link_counts_as_where_it_leads(base: Path) -> None:
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    (base / "link").symlink_to("open")
    assert "everybody" in places.problem(str(base / "link"))
    assert places.problem(str(base / "missing"))


def test_in_a_container_without_root_what_is_roots_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "_has_number", lambda uid: False)
    assert NOBODY in places._trusted()
    monkeypatch.setattr(places, "_has_number", lambda uid: True)
    assert NOBODY not in places._trusted() or os.geteuid() == NOBODY


def test_such_a_place_is_passed_over_and_the_doctor_says_so(unsafe: Path) -> None:
    folder = PrivateFolder()
    try:
        assert os.path.dirname(folder.path) == "/tmp"
        assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    finally:
        folder.remove()
    assert os.listdir(unsafe) == []
    found = {finding.what: finding for finding in machine._folder()}
    assert found["temporary files"].value.startswith("/tmp,")
    assert str(unsafe.parent) in found["a place passed over"].value
    assert not found["a place passed over"].fatal


def test_hosts_pass_it_over_too(unsafe: Path) -> None:
    session = HostSession(Order(node=1, epoch=1, address="", port=0, link=""), bytes(32))
    try:
        assert os.path.dirname(session.folder) == "/tmp"
    finally:
        session.close()


def test_where_there_is_no_other_place_no_session_starts(
    unsafe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "places", lambda: [str(unsafe), "/nowhere", "/tmp/" + "x" * 60])
    with pytest.raises(LaunchError, match=r"everybody may rename .*chmod \+t.*/nowhere cannot"):
        PrivateFolder()
    (finding,) = machine._folder()
    assert finding.fatal
    assert "set TMPDIR" in finding.mend


def test_keys_of_hosts_are_not_put_there(unsafe: Path) -> None:
    plan = HostPlan(launcher="command", nodes=1, command="{agent}", folder=str(unsafe / "shared"))
    with pytest.raises(LaunchError, match="everybody may rename") as caught:
        Hosts(plan)
    assert "--folder" in str(caught.value)


def test_sessions_are_not_looked_for_there(unsafe: Path) -> None:
    assert str(unsafe) not in kept._bases()
    folder = unsafe / "distsession-x"
    folder.mkdir(mode=0o700)
    with pytest.raises(KeptSessionError, match="another user's session"):
        kept.find_kept(str(folder))
