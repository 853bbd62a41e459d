"""What the system can do with the pages of a process's memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

__all__ = ["needs_copied_pages", "needs_large_pages", "needs_pagemap"]


def _is_linux(*least: int) -> bool:
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= least


# By what the system says of itself: if the product asks in vain, a test is to fail.
needs_large_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").exists() or not _is_linux(6, 1),
    reason="this system gives no large pages when asked (Linux 6.1 does)",
)
needs_copied_pages = pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists() or not _is_linux(5, 14),
    reason="this system does not say which pages were copied, or copies none ahead (Linux 5.14)",
)
needs_pagemap = pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(),
    reason="this system does not say which pages a process has changed",
)
