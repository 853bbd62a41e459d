"""Memory of the stand-in's devices, read by other processes: what CUDA's IPC is played by.

Preloaded after ``tests.standin.register``, this has distsession's ranks lend each other what lies
on their devices. A handle is the process and the address, and who opens it reads from there
(``process_vm_readv``). As on CUDA:

* A handle is of use in other processes only; the one that made it cannot open it.
* Nothing keeps the memory for the reader. What it reads of memory that was let go of is whatever
  lies there by then.
* To open one raises an ordinary error where it cannot be had. To copy may break the device.

What is false:

1. An owner that has ended is an error here. CUDA's driver keeps the pages for who has them open,
   and promises nothing: ``orphaned`` below reads something else instead.
2. A copy is made in the call, once the current stream is done. CUDA's is enqueued there.
3. All memory can be lent. CUDA lends neither that of slices nor of expandable segments, nor between
   containers that do not share it: ``unlent`` and ``refused`` below.
4. A device reads the memory of any other. On CUDA two GPUs need peer access.

``DISTSESSION_STANDIN_IPC`` has a process do otherwise, to show what is to come of it: ``unlent``
(no handle can be made), ``refused`` (none can be opened), ``broken`` (a copy breaks the device) and
``orphaned`` (half of it is copied, then the owner is killed, and the rest is rubbish) and ``slow``
(a copy takes minutes, and can be stopped).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time

import torch

from distsession.engine import device_ipc
from distsession.engine.process import started_at

PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)
WAIT_S = 60.0


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


class StandinIpc:
    """What the stand-in has for CUDA's IPC."""

    def export(self, memory: torch.Tensor) -> bytes:
        if _mode() == "unlent":
            raise RuntimeError("this memory cannot be lent")
        torch.accelerator.current_stream(memory.device).synchronize()
        # Where the system lets only a parent look into a process, this one lets anybody.
        _libc.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
        pid = os.getpid()
        return pickle.dumps((pid, started_at(pid), memory.data_ptr()))

    def copy(self, handle: bytes, target: torch.Tensor) -> None:
        pid, started, address = pickle.loads(handle)
        if _mode() == "refused":
            raise RuntimeError("this memory cannot be opened here")
        if pid == os.getpid():
            raise RuntimeError("a process cannot open its own handle")
        if _mode() == "broken":
            torch.standin._break(target.device)  # type: ignore[attr-defined]
        torch.accelerator.current_stream(target.device).synchronize()
        count = target.numel()
        if _mode() == "slow":
            time.sleep(WAIT_S * 5)
        if _mode() == "orphaned":
            _read(pid, address, target[: count // 2])
            os.kill(pid, signal.SIGKILL)
            _wait_for_end(pid, started)
            target[count // 2 :] = 77
            return
        _read(pid, address, target)


def _mode() -> str:
    return os.environ.get("DISTSESSION_STANDIN_IPC", "")


def _read(pid: int, address: int, target: torch.Tensor) -> None:
    done, count = 0, target.numel()
    while done < count:
        here = _Span(target.data_ptr() + done, count - done)
        there = _Span(address + done, count - done)
        read = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if read <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the memory of process {pid} is gone: {os.strerror(code)}")
        done += read


def _wait_for_end(pid: int, started: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while started_at(pid) == started and time.monotonic() < deadline:
        time.sleep(0.01)


device_ipc.register("standin", StandinIpc())
