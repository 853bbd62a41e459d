"""Memory keeps what is in it when its pages become large."""

from __future__ import annotations

import subprocess
import sys

from tests.large_pages import needs_large_pages

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
