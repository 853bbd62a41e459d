"""The memory of a process that is forked often, page by page.

A fork copies an entry for each page of 4 KB, and the end of the child takes each away: for an agent
with torch these are 80,000. A large page has one. What a child writes to is copied in pages of
4 KB, whichever it was in; a rank copies some 3,000 before it has anything to do.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import sys
from array import array
from collections.abc import Iterator, Sequence

__all__ = ["Ranges", "changed_pages", "copied_pages", "copy_pages", "use_large_pages"]

Ranges = Sequence[tuple[int, int]]
"""Where pieces of memory begin and end."""

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_LARGE = 2 << 20
"""Bytes of a large page. Where these are others, or it is an older Linux, the system refuses."""
_IS_PRESENT, _IS_EXCLUSIVE = 1 << 63, 1 << 56
"""Bits of /proc/PID/pagemap: a page is in memory, and no other process has it (Linux 4.2)."""
_IS_SWAPPED, _IS_OF_FILE = 1 << 62, 1 << 61
_CHANGED = bytes(
    bool(flags << 56 & (_IS_PRESENT | _IS_SWAPPED)) and not flags << 56 & _IS_OF_FILE
    for flags in range(256)
)
"""For the highest byte of an entry of pagemap: whether the page is there, and no page of a file."""


def use_large_pages() -> int:
    """Put what this process has in memory now into large pages, where the system can.

    Returns:
        How many there are.
    """
    if sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    done = 0
    for begin, end in _memory("self", of_files=False):
        for address in range(-(-begin // _LARGE) * _LARGE, end - _LARGE + 1, _LARGE):
            if not madvise(ctypes.c_void_p(address), ctypes.c_size_t(_LARGE), _MADV_COLLAPSE):
                done += 1
            elif ctypes.get_errno() == errno.ENOMEM:
                return done  # what is there need not be got by swapping
    return done


def copied_pages(child: int, limit: int) -> Ranges:
    """Which pages of this process a child has copies of, since it has written to them.

    Args:
        child: Its pid.
        limit: The most pages; it has done more than to begin if there are more, and none is given.

    Returns:
        Where they are; nothing where the system does not say so.
    """
    found: list[tuple[int, int]] = []
    count = 0
    try:
        copies = {page for page, flags in _flags(str(child)) if flags & _IS_EXCLUSIVE}
        for page, _ in _flags("self"):
            if page not in copies:
                continue
            count += 1
            if found and found[-1][1] == page:
                found[-1] = found[-1][0], page + mmap.PAGESIZE
            else:
                found.append((page, page + mmap.PAGESIZE))
    except (OSError, ValueError):
        return ()
    return found if count <= limit else ()


def changed_pages(address: int, length: int) -> Ranges:
    """Which pages of a file that this process has mapped privately are copies of its own.

    Args:
        address: Where the mapping begins.
        length: How many bytes it has.

    Raises:
        OSError: The system does not say so.
    """
    first, last = address // mmap.PAGESIZE, -(-(address + length) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(first * 8)
        entries = pagemap.read((last - first) * 8)
    if len(entries) != (last - first) * 8:
        raise OSError("/proc/self/pagemap has less than was asked for")
    # 64,000 pages are looked at in 1 ms, by functions of C alone.
    flags = entries[7 if sys.byteorder == "little" else 0 :: 8].translate(_CHANGED)
    return [
        ((first + run.start()) * mmap.PAGESIZE, (first + run.end()) * mmap.PAGESIZE)
        for run in re.finditer(rb"\x01+", flags)
    ]


def copy_pages(ranges: Ranges) -> None:
    """In a forked process: take the copies that it would take when it first writes there."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for begin, end in ranges:  # what has gone since, or an older Linux, is refused
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)


def _flags(process: str) -> Iterator[tuple[int, int]]:
    """The pages of a process that are in memory and that it can write to, with flags of each."""
    with open(f"/proc/{process}/pagemap", "rb", buffering=0) as pagemap:
        for begin, end in _memory(process, of_files=True):
            pagemap.seek(begin // mmap.PAGESIZE * 8)
            entries = array("Q", pagemap.read((end - begin) // mmap.PAGESIZE * 8))
            for number, flags in enumerate(entries):
                if flags & _IS_PRESENT:
                    yield begin + number * mmap.PAGESIZE, flags


def _memory(process: str, *, of_files: bool) -> list[tuple[int, int]]:
    """The ranges of memory that can be written to, and that others do not see."""
    found = []
    try:
        with open(f"/proc/{process}/maps") as maps:
            for line in maps:
                where, access, _, _, _, *path = line.split(maxsplit=5)
                if access == "rw-p" and (of_files or not path or path[0].strip() == "[heap]"):
                    begin, end = (int(part, 16) for part in where.split("-"))
                    found.append((begin, end))
    except OSError:
        pass
    return found
