"""A kernel's begin and end: what a session needs is there between the two, and only there."""

from __future__ import annotations

import os

import pytest

from tests.conftest import assert_nothing_left, traces
from tests.until import until

from .kernel import Notebook

pytestmark = pytest.mark.usefixtures("cold_agents")


def test_load_ext_starts_nothing_and_loads_no_torch() -> None:
    before = traces()
    notebook = Notebook()
    try:
        assert not notebook.run("%load_ext distsession").error
        assert notebook.run("import sys; 'torch' in sys.modules").result == "False"
        assert len(traces().processes - before.processes) == 1  # the kernel itself
    finally:
        notebook.close()  # a shutdown, as the menu's


@pytest.mark.parametrize("how", ["restart", "shutdown", "kill"])
def test_a_kernels_end_leaves_nothing(how: str) -> None:
    before = traces()
    notebook = Notebook()
    try:
        kernel = notebook.run("import os; os.getpid()").result
        notebook.run("from distsession import Session\nsession = Session(2)\nsession.client")
        if how == "restart":
            notebook.manager.restart_kernel()
            notebook.client.wait_for_ready(timeout=100)
            fresh = notebook.run("import os; os.getpid()").result
            assert fresh != kernel
            until(lambda: traces().processes - before.processes == {int(fresh)})
        elif how == "kill":
            os.kill(int(kernel), 9)
            assert_nothing_left(before)
    finally:
        notebook.close()  # a shutdown, as the menu's
    assert_nothing_left(before)
