"""What is kept of the output of a session that nobody has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from distsession import Session
from distsession.cli import main
from tests.until import until

from .conftest import Recorder

LINES = """
import time
for number in range(100_000):
    print(f"line {number:>80}")
time.sleep(1)
print("the end")
"""
SIZE = 100_000 * 86 + len("the end\n")


def test_a_log_stays_short_while_nobody_is_there_and_what_is_missing_is_said(
    start: Callable[..., Session],
) -> None:
    name = f"output-{os.getpid()}"
    session = start(1, keep=600, keep_output="1M", name=name)
    path = session.log_path(0)
    assert path is not None
    with contextlib.ExitStack() as stack:
        session.submit(exec, LINES)
        session.detach()
        stack.callback(main, ["stop", name])
        until(lambda: path.stat().st_size == SIZE)
        until(lambda: path.stat().st_blocks * 512 <= 2 << 20)
        output = Recorder()
        attached = Session.attach(name, output=output)
        (future,) = attached.pending()
        future.result(timeout=60)
        until(lambda: output.text(0).endswith("the end\n"))
        attached.detach()
    _, *lines, end = output.text(0).splitlines()
    numbers = [int(line.split()[1]) for line in lines]
    assert end == "the end"
    assert numbers == list(range(numbers[0], 100_000))
    missing = SIZE - len(output.text(0))
    assert 7_000_000 < missing < 8_000_000
    said = f"distsession: {missing:,} bytes of text were given back to the disk.\n"
    assert said in output.text(0, "stderr")
