"""Large pages for the memory of a process that is forked often.

A fork copies an entry for each page of 4 KB, and the end of the child takes each away: for an agent
with torch these are 80,000. A large page has one. What a child writes to is copied in pages of
4 KB, as it was.
"""

from __future__ import annotations

import ctypes
import errno
import sys

__all__ = ["use_large_pages"]

_MADV_COLLAPSE = 25  # <linux/mman.h>, Linux 6.1
_SIZE = 2 << 20
"""Bytes of a large page. Where these are others, or it is an older Linux, the system refuses."""


def use_large_pages() -> int:
    """Put what this process has in memory now into large pages, where the system can.

    Returns:
        How many there are.
    """
    if sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    done = 0
    for begin, end in _own_memory():
        for address in range(-(-begin // _SIZE) * _SIZE, end - _SIZE + 1, _SIZE):
            if not madvise(ctypes.c_void_p(address), ctypes.c_size_t(_SIZE), _MADV_COLLAPSE):
                done += 1
            elif ctypes.get_errno() == errno.ENOMEM:
                return done  # what is there need not be got by swapping
    return done


def _own_memory() -> list[tuple[int, int]]:
    """The ranges of memory that can be written to, and are of no file."""
    found = []
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                where, access, _, _, _, *path = line.split()
                if access == "rw-p" and (not path or path[0] == "[heap]"):
                    begin, end = (int(part, 16) for part in where.split("-"))
                    found.append((begin, end))
    except OSError:
        pass
    return found
