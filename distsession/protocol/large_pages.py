"""A file's memory as one process sees it, in large pages where the system has them.

To find memory in pages of 4 kB takes several times as long as to write to it, and each process
that maps it later has to find each page, too. A large page stands for 512 of them.

Most systems give shared memory none by themselves (``shmem_enabled`` is ``never``). But they put
together into one what is there already, for any user who asks (``MADV_COLLAPSE``, madvise(2), Linux
6.1), and what is not there is filled with zeros. So one small page of each large one is allocated,
and the system does the rest. Both ends have to map the file where a large page may begin.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from typing import Any

__all__ = ["LARGE_PAGE", "MADV_COLLAPSE", "FileMemory", "are_given_when_asked", "map_file"]

LARGE_PAGE = 2 << 20
"""Bytes of a large page. Where these are others, or it is an older Linux, the system refuses."""

MADV_COLLAPSE = 25  # <linux/mman.h>, Linux 6.1

SHARED_HUGE = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
"""Where the system says whether shared memory lies in large pages when that is asked for."""


class FileMemory:
    """The first bytes of a file, as memory that can be read and written.

    It stays mapped as long as a view of it is left.

    Args:
        descriptor: Of the file; it may be closed afterwards.
        length: How many bytes, at least one.
        flags: ``mmap.MAP_SHARED`` or ``mmap.MAP_PRIVATE``.

    Raises:
        OSError: The system refuses it.
    """

    def __init__(self, descriptor: int, length: int, flags: int):
        self.length = length
        self._begin = 0
        if length < LARGE_PAGE or sys.platform != "linux":
            self.mapped = map_file(descriptor, length, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            """What refers to it is a view."""
            return
        # Python's own mapping begins where the system likes. So a piece is mapped that is longer,
        # and the file in the midst of it.
        self.mapped = mmap.mmap(-1, length + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        self._begin = -self._start_of_mapped() % LARGE_PAGE
        _map_at(self.address, length, flags, descriptor)

    def _start_of_mapped(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))

    @property
    def address(self) -> int:
        """Where it begins in the memory of this process."""
        return self._start_of_mapped() + self._begin

    def view(self) -> memoryview:
        """All of it."""
        return memoryview(self.mapped)[self._begin : self._begin + self.length]

    def advise(self, option: int, at: int = 0, length: int | None = None) -> None:
        """Call madvise(2) for a part of it.

        Args:
            option: A ``MADV_`` of the system's.
            at: The first byte of the part; where a page begins.
            length: How many bytes. Default: up to the end.

        Raises:
            OSError: The system refuses it.
        """
        length = self.length - at if length is None else length
        self.mapped.madvise(option, self._begin + at, length)

    def collapse(self, descriptor: int, at: int) -> bool:
        """Have a large page hold a part of it; whether one does.

        What is there already stays as it is, and what is not is zero.

        Args:
            descriptor: Of the file.
            at: The first byte of the part; where a large page begins.
        """
        try:
            os.posix_fallocate(descriptor, at, 1)
            self.advise(MADV_COLLAPSE, at, LARGE_PAGE)
        except OSError:
            return False
        return True


def map_file(descriptor: int, length: int, flags: int, access: int, offset: int = 0) -> mmap.mmap:
    """A part of a file as memory.

    Raises:
        OSError: The system refuses it.
    """
    # A mapping need not keep the descriptor that it was made from; before 3.13 Python's does.
    extra = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(descriptor, length, flags=flags, prot=access, offset=offset, **extra)


def are_given_when_asked() -> bool:
    """Whether shared memory lies in large pages where that is asked for (``MADV_HUGEPAGE``)."""
    with contextlib.suppress(OSError), open(SHARED_HUGE) as file:
        said = file.read()
        return any(f"[{mode}]" in said for mode in ("advise", "within_size", "always"))
    return False


@functools.cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    return function


_MAP_FIXED = 0x10  # <linux/mman.h>; Python does not have it


def _map_at(address: int, length: int, flags: int, descriptor: int) -> None:
    """Map a file from its beginning in the place of what this process has there."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap()(address, length, access, flags | _MAP_FIXED, descriptor, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
