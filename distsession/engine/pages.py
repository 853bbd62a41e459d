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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distsession.protocol.large_pages import LARGE_PAGE, MADV_COLLAPSE

__all__ = [
    "Pages",
    "Ranges",
    "changed_pages",
    "copied_pages",
    "mapped_pages",
    "take_pages",
    "use_large_pages",
]

Ranges = Sequence[tuple[int, int]]
"""Where pieces of memory begin and end."""


@dataclass(frozen=True)
class Pages:
    """What a process that was forked does with its memory as it begins.

    Attributes:
        copied: Where it writes to what it has from its parent.
        mapped: What it reads of libraries.
    """

    copied: Ranges = ()
    mapped: Ranges = ()


_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, Linux 5.14
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
        for address in range(
            -(-begin // LARGE_PAGE) * LARGE_PAGE, end - LARGE_PAGE + 1, LARGE_PAGE
        ):
            if not madvise(ctypes.c_void_p(address), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE):
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
    try:
        there = _flags(str(child), _memory(str(child), of_files=True))
        copies = {page for page, flags in there if flags & _IS_EXCLUSIVE}
        mine = _flags("self", _memory("self", of_files=True))
        pages = [page for page, _ in mine if page in copies]
    except (OSError, ValueError):
        return ()
    return _joined(pages) if len(pages) <= limit else ()


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


def mapped_pages(process: int) -> Ranges:
    """Which pages of libraries, which cannot be written to, a process has mapped.

    Returns:
        Where they are; nothing where the system does not say so.
    """
    try:
        return _joined(page for page, _ in _flags(str(process), _code(str(process))))
    except (OSError, ValueError):
        return ()


def take_pages(pages: Pages) -> None:
    """In a forked process: copy and map at once what it would when it first writes or reads there.

    What has gone since is refused, and all by an older Linux.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for ranges, advice in (
        (pages.copied, _MADV_POPULATE_WRITE),
        (pages.mapped, _MADV_POPULATE_READ),
    ):
        for begin, end in ranges:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _joined(pages: Iterable[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and found[-1][1] == page:
            found[-1] = found[-1][0], page + mmap.PAGESIZE
        else:
            found.append((page, page + mmap.PAGESIZE))
    return found


def _flags(process: str, memory: Ranges) -> Iterator[tuple[int, int]]:
    """The pages of a process within such ranges that are in memory, with flags of each."""
    with open(f"/proc/{process}/pagemap", "rb", buffering=0) as pagemap:
        for begin, end in memory:
            pagemap.seek(begin // mmap.PAGESIZE * 8)
            entries = array("Q", pagemap.read((end - begin) // mmap.PAGESIZE * 8))
            for number, flags in enumerate(entries):
                if flags & _IS_PRESENT:
                    yield begin + number * mmap.PAGESIZE, flags


def _memory(process: str, *, of_files: bool) -> Ranges:
    """The ranges of memory that can be written to, and that others do not see."""
    return [
        where
        for where, access, path in _maps(process)
        if access == "rw-p" and (of_files or path in ("", "[heap]"))
    ]


def _code(process: str) -> Ranges:
    """Those of files that can only be read."""
    readable = ("r--p", "r-xp")
    return [w for w, access, path in _maps(process) if access in readable and path[:1] == "/"]


def _maps(process: str) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Where each mapping of a process is, what is allowed there, and of which file it is."""
    try:
        with open(f"/proc/{process}/maps") as maps:
            for line in maps:
                where, access, _, _, _, *path = line.split(maxsplit=5)
                begin, end = (int(part, 16) for part in where.split("-"))
                yield (begin, end), access, path[0].strip() if path else ""
    except OSError:
        return
