"""Sessions where the folders of the user are not there, or are links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

USES_A_SESSION = """
import os, sys
from distsession import Session
with Session(2) as session:
    print(os.path.dirname(session.launcher.folder))
    session.execute("import os; print(os.path.exists(os.path.expanduser('~')), rank)")
    if "client" in sys.argv:
        print(session.client.ids)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets, which lies in none of another test."""
    folder = tempfile.mkdtemp(prefix="place-", dir="/tmp")
    yield Path(folder)
    shutil.rmtree(folder)


def said(code: str, *arguments: str, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environ},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("more", [[], ["client"]], ids=["cells", "ipyparallel"])
@pytest.mark.parametrize("name", ["HOME", "IPYTHONDIR"])
def test_nothing_is_left_where_ipython_has_no_folder(
    place: Path, name: str, more: list[str]
) -> None:
    missing = str(place / "missing" / "it")
    lines = said(USES_A_SESSION, *more, TMPDIR=str(place), **{name: missing})
    assert lines[0] == str(place)
    is_there = name != "HOME"
    assert sorted(lines[1:3]) == [f"[0] {is_there} 0", f"[1] {is_there} 1"]
    assert lines[3:] == ["[0, 1]"] * len(more)
    # torch makes this one when torch._dynamo is imported, as an agent does that has nothing to do.
    assert not [path for path in place.iterdir() if not path.name.startswith("torchinductor_")]


KEEPS = """
import os, sys
from distsession import Session
session = Session(2, name="linked", keep=60)
session.execute("kept = rank + 1")
os._exit(0)
"""
ATTACHES = """
import sys
from distsession import Session
from distsession.cluster.kept import find_kept
print(find_kept("linked").world_size)
session = Session.attach(find_kept("linked").folder)
print(dict(session.evaluate("kept")))
session.close()
"""


@pytest.mark.parametrize("name", ["TMPDIR", "HOME", "XDG_RUNTIME_DIR"])
def test_a_folder_of_the_user_that_is_a_link_serves_as_what_it_leads_to(
    place: Path, name: str
) -> None:
    (place / "real").mkdir()
    link = place / "link"
    link.symlink_to(place / "real")
    environ = {"TMPDIR": str(place), name: str(link)}
    lines = said(USES_A_SESSION, "client", **environ)
    assert lines[0] == str(place / "real" if name == "TMPDIR" else place)
    assert sorted(lines[1:3]) == ["[0] True 0", "[1] True 1"]
    said(KEEPS, **environ)
    # Another process has the place by its own name, or by another link.
    (place / "other").symlink_to("real")
    lines = said(ATTACHES, **{**environ, name: str(place / "other")})
    assert lines == ["2", "{0: 1, 1: 2}"]
    left = {path.name for path in place.rglob("*") if not path.name.startswith(".ipython")}
    assert not [each for each in left if each.startswith("distsession-")]


def test_a_link_that_leads_nowhere_is_passed_over(place: Path) -> None:
    link = place / "link"
    link.symlink_to(place / "missing")
    lines = said(USES_A_SESSION, TMPDIR=str(link))
    assert os.path.isdir(lines[0])
    assert not lines[0].startswith(str(place))


def test_a_link_to_a_place_where_others_may_rename_is_passed_over(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "link").symlink_to(place / "open")
    lines = said(USES_A_SESSION, TMPDIR=str(place / "link"))
    assert not lines[0].startswith(str(place))
