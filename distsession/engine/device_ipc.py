"""Tensors from the device of one rank to that of another on the same host, past this host's memory.

The memory stays with its owner, which lends it: it says in some bytes (a handle) where it lies, and
holds it as it is. Another process opens the handle, copies on its own device, and closes it again,
all within one call, so nothing of the owner's is left there. Whoever has asked for both then asks
the owner whether it has held the memory all the while. Only then is the copy of any use: what a
device gives of memory that its owner has let go is not defined.

On CUDA it is the driver's IPC, called as it is. ``torch.multiprocessing`` has that, too, but keeps
its account of who uses what in files in ``/dev/shm``, which stay when a process is killed, and puts
the user's tensor behind that account for the rest of its life.

What cannot be lent or borrowed, and there is much of that, goes through this host's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import pickle
from typing import Protocol

import torch

from distsession.engine import pinned
from distsession.protocol.tensor_memory import BorrowError, RemoteBytes

__all__ = ["DeviceIpc", "Loans", "borrow", "borrowed_bytes", "register"]

log = logging.getLogger(__name__)


class DeviceIpc(Protocol):
    """How processes of one host reach each other's memory on one type of device.

    Both raise a RuntimeError (or OSError) where it cannot be done.
    """

    def export(self, memory: torch.Tensor) -> bytes:
        """A handle of what is in this memory once the current stream has come here.

        Args:
            memory: Flat, of dtype uint8.
        """

    def copy(self, handle: bytes, target: torch.Tensor) -> None:
        """Copy what another process has exported; it is there when this returns.

        Args:
            handle: From the other process.
            target: Flat, of dtype uint8, and as long as what was exported.
        """


class Loans:
    """What this process lends: the memory that one answer refers to, until it is asked for it."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._is_unchanged = False

    def begin(self) -> None:
        """What is lent from here on belongs together; what was lent before is not wanted."""
        self._held, self._is_unchanged = [], True

    def lend(self, frame: RemoteBytes) -> bytes | None:
        """A handle of a frame, whose memory is held; None where it is better written."""
        if not isinstance(frame, pinned.DeviceBytes):
            return None
        memory = frame.tensor
        ipc = _of(memory.device)
        if ipc is None:
            return None
        try:
            handle = ipc.export(memory)
        except (RuntimeError, OSError) as error:
            log.info("memory of %s cannot be lent, it is copied: %s", memory.device, error)
            return None
        self._held.append(memory)
        return handle

    def touch(self) -> None:
        """Something is about to run that may change what is lent."""
        self._is_unchanged = False

    def end(self) -> bool:
        """Let go of it; gives whether something was lent, and is as it was then."""
        is_unchanged, self._held, self._is_unchanged = self._is_unchanged, [], False
        return is_unchanged


def borrow(handle: bytes, count: int, device: torch.device | None) -> torch.Tensor:
    """A copy of what another process of this host lends.

    Args:
        handle: What that one has said of it.
        count: How many bytes.
        device: Where the copy is to be.

    Raises:
        BorrowError: It cannot be had so.
    """
    ipc = None if device is None else _of(device)
    if ipc is None:
        raise BorrowError(f"{device} reaches no memory of other processes")
    try:
        memory = torch.empty(count, dtype=torch.uint8, device=device)
        ipc.copy(handle, memory)
    except torch.OutOfMemoryError:  # the other way it would not fit, either
        raise
    except (RuntimeError, OSError) as error:
        raise BorrowError(f"{type(error).__name__}: {error}") from error
    global _borrowed
    _borrowed += count
    return memory


def borrowed_bytes() -> int:
    """How much of what others lent this process has copied."""
    return _borrowed


_borrowed = 0


def register(type_of_device: str, ipc: DeviceIpc) -> None:
    """Have tensors of another type of device go straight from rank to rank, too.

    Args:
        type_of_device: As torch calls it.
        ipc: How.
    """
    _registered[type_of_device] = ipc


_registered: dict[str, DeviceIpc] = {}


def _of(device: torch.device) -> DeviceIpc | None:
    if device.type == "cuda":
        return _cuda()
    return _registered.get(device.type)


# --- CUDA -----------------------------------------------------------------------------------------

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: needed where the memory is another GPU's."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_Address = ctypes.c_uint64
_Pointer = ctypes.c_void_p

_FUNCTIONS = {
    "cuMemGetAddressRange_v2": (_Pointer, _Pointer, _Address),
    "cuIpcGetMemHandle": (_Pointer, _Address),
    "cuIpcOpenMemHandle_v2": (_Pointer, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Address,),
    "cuMemcpyDtoDAsync_v2": (_Address, _Address, ctypes.c_size_t, _Pointer),
    "cuGetErrorName": (ctypes.c_int, _Pointer),
}
"""What is used of CUDA's driver, with the types of its arguments."""


@functools.cache
def _cuda() -> DeviceIpc | None:
    """CUDA's; None where torch's ``cuda`` is something else, as on AMD's GPUs."""
    if torch.version.cuda is None:
        return None
    try:
        return CudaIpc("libcuda.so.1")
    except (OSError, AttributeError) as error:
        log.info("there is no IPC of CUDA's, tensors go through the host's memory: %s", error)
        return None


class CudaIpc:
    """By the driver, in the context that torch has made for the device.

    Args:
        library: The driver's name, or its path.

    Raises:
        OSError: It is not here.
        AttributeError: It has not all of what is used.
    """

    def __init__(self, library: str):
        self._driver = ctypes.CDLL(library)
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._driver, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def export(self, memory: torch.Tensor) -> bytes:
        base, handle = _Address(), _Handle()
        with torch.cuda.device(memory.device):
            torch.cuda.current_stream().synchronize()
            # A handle is of a whole allocation, of which torch gives out parts.
            self._call(
                "cuMemGetAddressRange_v2", ctypes.byref(base), None, _Address(memory.data_ptr())
            )
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return pickle.dumps((bytes(handle), memory.data_ptr() - base.value))

    def copy(self, handle: bytes, target: torch.Tensor) -> None:
        whole, offset = pickle.loads(handle)
        base = _Address()
        with torch.cuda.device(target.device):
            stream = torch.cuda.current_stream()
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(base),
                _Handle.from_buffer_copy(whole),
                _LAZY_PEER_ACCESS,
            )
            try:
                self._call(
                    "cuMemcpyDtoDAsync_v2",
                    _Address(target.data_ptr()),
                    _Address(base.value + offset),
                    target.numel(),
                    stream.cuda_stream,
                )
                stream.synchronize()
            finally:
                # After an error of the device this fails as all does, and is said by what follows.
                with contextlib.suppress(RuntimeError):
                    self._call("cuIpcCloseMemHandle", base)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(said))
            raise RuntimeError(f"{name}: {(said.value or str(code).encode()).decode()}")
