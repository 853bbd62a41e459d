"""Whether the system puts memory into large pages where a process asks for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

__all__ = ["needs_large_pages"]


def _are_there() -> bool:
    """By what the system says of itself: if the product asks in vain, a test is to fail."""
    if not Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").exists():
        return False
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (6, 1)


needs_large_pages = pytest.mark.skipif(
    not _are_there(), reason="this system gives no large pages when asked (Linux 6.1 does)"
)
