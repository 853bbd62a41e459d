"""Facts about a host."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
int ncclGetVersion(int *version) { *version = 23102; return 0; }
"""

PROGRAM = """
import ctypes, sys
from importlib.metadata import packages_distributions, version
import torch.distributed as dist
from distsession.engine import host_info
if "libnccl" in open("/proc/self/maps").read():  # torch was built with it
    expected = version(next(n for n in packages_distributions()["nvidia"] if "nvidia-nccl-" in n))
else:
    dist.is_nccl_available = lambda: True
    ctypes.CDLL(sys.argv[1])
    expected = "2.31.2"
print(expected, ".".join(map(str, host_info.nccl_version())))
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(tmp_path: Path) -> None:
    """torch would say which one it was compiled with."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(LIBRARY)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source]
    subprocess.run(command, check=True, timeout=60)
    command = [sys.executable, "-c", PROGRAM, library]
    said = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    expected, found = said.split()
    assert found == expected
