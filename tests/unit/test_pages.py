"""Memory keeps what is in it when its pages become large, or are copied ahead."""

from __future__ import annotations

import subprocess
import sys

from tests.memory_pages import needs_copied_pages, needs_large_pages

PROGRAM = """
import mmap, os
from distsession.engine.pages import use_large_pages

memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, len(memory), 4096):
    memory[page : page + 8] = page.to_bytes(8, "big")
print(use_large_pages())
pid = os.fork()
for page in range(0, len(memory), 4096):
    assert memory[page : page + 8] == page.to_bytes(8, "big")
if not pid:
    memory[:8] = b"of child"
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert memory[:8] == bytes(8)
"""


@needs_large_pages
def test_memory_in_large_pages_holds_what_it_held_and_a_child_has_a_copy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 7


COPIES = """
import mmap, os, resource, sys
from distsession.engine.pages import Pages, copied_pages, take_pages

PAGE, COUNT = mmap.PAGESIZE, 2000
memory = mmap.mmap(-1, COUNT * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(COUNT):
    memory[page * PAGE] = page % 251
written = range(0, COUNT, 4)


def child(program):
    mine, its = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(its[1])  # so that it ends with its parent
        os.write(mine[1], str(program()).encode())
        os.read(its[0], 1)
        os._exit(0)
    return pid, os.read(mine[0], 100).decode(), its[1]


def write():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in written:
        memory[page * PAGE + 1] = 7
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


pid, faults, end = child(write)
assert int(faults) >= len(written), faults
found = copied_pages(pid, 1 << 20)
assert copied_pages(pid, 10) == ()  # it has more
os.write(end, b"x")
os.waitpid(pid, 0)
assert copied_pages(pid, 1 << 20) == ()  # there is no such process


def copy_and_write():
    take_pages(Pages([*found, (1 << 20, 2 << 20)]))  # the last has nothing mapped
    assert all(memory[page * PAGE] == page % 251 for page in range(COUNT))
    return write()


pid, faults, end = child(copy_and_write)
assert int(faults) < len(written) // 10, faults
os.write(end, b"x")
os.waitpid(pid, 0)
assert all(memory[page * PAGE + 1] == 0 for page in range(COUNT))
print("done")
"""


MAPPED = """
import mmap, os, resource
from distsession.engine.pages import Pages, mapped_pages, take_pages

PAGE, COUNT = mmap.PAGESIZE, 8000
file = os.memfd_create("file")
os.write(file, b"x" * COUNT * PAGE)
code = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
read = range(0, COUNT, 64)  # the system maps some pages around each
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def child(program):
    mine, its = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(its[1])
        os.write(mine[1], str(program()).encode())
        os.read(its[0], 1)
        os._exit(0)
    return pid, os.read(mine[0], 100).decode(), its[1]


def look():
    for pages in [0], read:  # first what doing so takes of Python
        before = faults()
        assert all(code[page * PAGE] == ord("x") for page in pages)
        count = faults() - before
    return count


pid, count, end = child(look)
assert int(count) >= len(read), count
found = mapped_pages(pid)
os.write(end, b"x")
os.waitpid(pid, 0)
assert mapped_pages(pid) == ()  # there is no such process
pid, count, end = child(lambda: (take_pages(Pages(mapped=found)), look())[1])
assert int(count) < len(read) // 3, count
os.write(end, b"x")
os.waitpid(pid, 0)
print("done")
"""


@needs_copied_pages
def test_a_child_maps_beforehand_what_another_has_read_of_a_file() -> None:
    done = subprocess.run([sys.executable, "-c", MAPPED], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


@needs_copied_pages
def test_a_child_takes_beforehand_the_copies_that_another_has_taken() -> None:
    done = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
