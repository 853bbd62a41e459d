"""Reading the counts of out-of-memory kills, of cgroups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsession.engine.oom import OomKills


class Host:
    """Files as the system has them."""

    def __init__(self, folder: Path, mountinfo: str, cgroup: str):
        self.proc, self.mount = folder / "proc", folder / "mount"
        for part in (self.proc / "self", self.proc / "7", self.mount):
            part.mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text(mountinfo.format(mount=self.mount))
        (self.proc / "7/cgroup").write_text(cgroup)
        self.host(3)

    def host(self, count: int) -> None:
        (self.proc / "vmstat").write_text(f"pgfault 9\noom_kill {count}\n")

    def write(self, path: str, text: str) -> None:
        file = self.mount / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def reader(self) -> OomKills:
        return OomKills(str(self.proc))


V2 = "30 23 0:26 / {mount} rw - cgroup2 cgroup2 rw\n"
V2_INSIDE = "30 23 0:26 /pod/a {mount} rw - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:27 / /elsewhere rw - cgroup cgroup rw,cpu\n"
    "32 23 0:28 / {mount} rw shared:1 - cgroup cgroup rw,memory\n"
)


@pytest.mark.parametrize(
    ("mountinfo", "cgroup", "events", "limit"),
    [
        (V2, "0::/job\n", "job/memory.events", "job/memory.max"),
        (V2, "0::/job/without\n", "job/memory.events", "job/memory.max"),
        (V2_INSIDE, "0::/pod/a/job\n", "job/memory.events", "job/memory.max"),
        (V1, "4:memory:/job\n0::/\n", "job/memory.oom_control", "job/memory.limit_in_bytes"),
    ],
)
def test_the_count_of_the_cgroup_decides(
    tmp_path: Path, mountinfo: str, cgroup: str, events: str, limit: str
) -> None:
    host = Host(tmp_path, mountinfo, cgroup)
    host.write(events, "low 0\noom_kill 2\n")
    host.write(limit, f"{1 << 30}\n")
    reader = host.reader()
    reader.look_up(7)
    reader.watch(7)
    host.host(4)  # of somebody else
    assert reader.check(7) == (False, 0)
    reader.look_up(7)
    reader.watch(7)
    host.host(5)
    host.write(events, "low 0\noom_kill 3\n")
    assert reader.check(7) == (True, 1 << 30)
    reader.look_up(7)
    reader.watch(7)
    assert reader.check(7) == (False, 0)


def test_without_a_limit_none_is_told(tmp_path: Path) -> None:
    host = Host(tmp_path, V2, "0::/job\n")
    host.write("job/memory.events", "oom_kill 0\n")
    host.write("job/memory.max", "max\n")
    reader = host.reader()
    reader.look_up(7)
    reader.watch(7)
    host.write("job/memory.events", "oom_kill 1\n")
    assert reader.check(7) == (True, 0)


@pytest.mark.parametrize("cgroup", ["0::/\n", "", "4:memory:/job\n"])
def test_where_no_cgroup_counts_the_host_does(tmp_path: Path, cgroup: str) -> None:
    host = Host(tmp_path, V2, cgroup)
    reader = host.reader()
    reader.look_up(7)
    reader.watch(7)
    assert reader.check(7) == (False, 0)
    reader.look_up(7)
    reader.watch(7)
    host.host(4)
    assert reader.check(7) == (True, 0)


def test_a_process_that_has_ended_at_once_was_in_the_cgroup_of_its_parent(tmp_path: Path) -> None:
    host = Host(tmp_path, V2, "0::/job\n")
    host.write("job/memory.events", "oom_kill 0\n")
    reader = host.reader()
    reader.look_up(7)
    reader.watch(8)  # of which the system tells nothing
    host.host(4)
    assert reader.check(8) == (False, 0)
    reader.watch(9)
    host.write("job/memory.events", "oom_kill 1\n")
    assert reader.check(9) == (True, 0)
