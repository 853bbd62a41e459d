"""What one process lends of its device, and how CUDA's driver is called for it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distsession.engine import device_ipc, tensors
from distsession.engine.device_ipc import CudaIpc, Loans
from distsession.engine.pinned import DeviceBytes
from distsession.protocol import serialize
from distsession.protocol.tensor_memory import BorrowError

DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef struct { char reserved[64]; } Handle;
/* A driver whose allocations begin 4096 bytes before what is asked for, and lie in this process. */
static int fails_at, opened, closed, flags_seen;
static void *stream_seen;
static int call(int number) { return number == fails_at ? 201 : 0; }
void fail_at(int number) { fails_at = number; }
int open_handles(void) { return opened - closed; }
int flags(void) { return flags_seen; }
void *stream(void) { return stream_seen; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  *base = address - 4096;
  return size ? 1 : call(1);
}
int cuIpcGetMemHandle(Handle *handle, uint64_t base) {
  memset(handle, 0, sizeof *handle);
  memcpy(handle->reserved + 7, &base, sizeof base);
  handle->reserved[63] = 5;
  return call(2);
}
int cuIpcOpenMemHandle_v2(uint64_t *base, Handle handle, unsigned flags) {
  if (call(3) || handle.reserved[63] != 5) return 201;
  memcpy(base, handle.reserved + 7, sizeof *base);
  flags_seen = flags;
  ++opened;
  return 0;
}
int cuIpcCloseMemHandle(uint64_t base) { ++closed; return call(5); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t count, void *stream) {
  if (call(4)) return 201;
  memcpy((void *)to, (void *)from, count);
  stream_seen = stream;
  return 0;
}
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_PLAYED"; return 0; }
"""


class PlayedStream:
    """The current stream, where nothing is under way."""

    cuda_stream = 1 << 40

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    target = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", str(folder / "driver.c"), "-o", str(target)]
    subprocess.run(command, check=True)
    return str(target)


@pytest.fixture
def cuda(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaIpc]:
    """By a driver in C that has the real one's interface; the memory is the CPU's."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", PlayedStream)
    ipc = CudaIpc(library)
    yield ipc
    ipc._driver.fail_at(0)


MEMORY = torch.arange(100, dtype=torch.uint8)


def test_cuda_copies_from_where_the_handle_says(cuda: CudaIpc) -> None:
    target = torch.zeros(100, dtype=torch.uint8)
    cuda.copy(cuda.export(MEMORY), target)
    assert torch.equal(target, MEMORY)
    assert cuda._driver.open_handles() == 0
    assert cuda._driver.flags() == 1  # another GPU's memory can be reached, too
    cuda._driver.stream.restype = device_ipc._Pointer
    assert cuda._driver.stream() == PlayedStream.cuda_stream


@pytest.mark.parametrize(
    ("number", "function"), [(1, "cuMemGetAddressRange_v2"), (2, "cuIpcGetMemHandle")]
)
def test_what_cuda_does_not_lend_is_named(cuda: CudaIpc, number: int, function: str) -> None:
    cuda._driver.fail_at(number)
    with pytest.raises(RuntimeError, match=f"^{function}: CUDA_ERROR_PLAYED$"):
        cuda.export(MEMORY)


@pytest.mark.parametrize(
    ("number", "function"), [(3, "cuIpcOpenMemHandle_v2"), (4, "cuMemcpyDtoDAsync_v2")]
)
def test_a_copy_that_fails_leaves_nothing_open(cuda: CudaIpc, number: int, function: str) -> None:
    handle = cuda.export(MEMORY)
    cuda._driver.fail_at(number)
    with pytest.raises(RuntimeError, match=f"^{function}: CUDA_ERROR_PLAYED$"):
        cuda.copy(handle, torch.zeros(100, dtype=torch.uint8))
    assert cuda._driver.open_handles() == 0


def test_a_driver_that_lacks_something_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot open shared object"):
        CudaIpc(str(tmp_path / "libcuda.so.1"))
    with pytest.raises(AttributeError, match="cuMemGetAddressRange_v2"):
        CudaIpc("libc.so.6")


class Played:
    """A device whose memory is the CPU's."""

    def __init__(self) -> None:
        self.memory: dict[bytes, torch.Tensor] = {}
        self.problem: Exception | None = None

    def export(self, memory: torch.Tensor) -> bytes:
        if self.problem:
            raise self.problem
        handle = str(len(self.memory)).encode()
        self.memory[handle] = memory
        return handle

    def copy(self, handle: bytes, target: torch.Tensor) -> None:
        if self.problem:
            raise self.problem
        target.copy_(self.memory[handle])


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """The CPU counts as a device, of which what is large may be lent."""
    ipc = Played()
    monkeypatch.setattr(device_ipc, "_registered", {"cpu": ipc})
    monkeypatch.setattr(tensors, "_frame", DeviceBytes)
    monkeypatch.setattr(tensors, "_home", torch.device("cpu"))
    monkeypatch.setattr(serialize, "_make_reducer", tensors.Tensors)
    return ipc


def dump(value: Any, loans: Loans) -> serialize.Frames:
    loans.begin()
    return serialize.dump_value(value, what="it", may_be_remote=True, lend=loans.lend)


def test_what_is_lent_arrives_with_what_it_shares(played: Played) -> None:
    whole = torch.arange(1000.0)
    value = {"whole": whole, "part": whole[500:], "column": whole.reshape(500, 2)[:, 1].clone()}
    frames = dump(value, Loans())
    assert sum(len(memoryview(frame)) for frame in frames[1:]) < 400
    found = serialize.load(frames)
    assert all(torch.equal(found[name], value[name]) for name in value)
    found["whole"][600] = -1
    assert found["part"][100] == -1
    assert whole[600] == 600


def test_what_cannot_be_lent_is_sent(played: Played) -> None:
    played.problem = RuntimeError("not this")
    frames = dump(torch.arange(1000.0), Loans())
    assert [type(frame) for frame in frames].count(DeviceBytes) == 1


@pytest.mark.parametrize("problem", [RuntimeError("no peer"), OSError(3, "no process")])
def test_what_cannot_be_borrowed_is_said(played: Played, problem: Exception) -> None:
    frames = dump(torch.arange(1000.0), Loans())
    played.problem = problem
    with pytest.raises(BorrowError, match="no p"):
        serialize.load(frames)


def test_no_memory_for_a_copy_is_no_reason_for_another_way(played: Played) -> None:
    frames = dump(torch.arange(1000.0), Loans())
    played.problem = torch.OutOfMemoryError("too much")
    with pytest.raises(torch.OutOfMemoryError):
        serialize.load(frames)


def test_a_process_without_such_a_device_borrows_nothing(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = dump(torch.arange(1000.0), Loans())
    monkeypatch.setattr(tensors, "_home", None)
    with pytest.raises(BorrowError, match="reaches no memory of other processes"):
        serialize.load(frames)


def test_a_loan_is_held_until_it_is_returned(played: Played) -> None:
    loans, memory = Loans(), torch.arange(1000, dtype=torch.uint8)
    loans.begin()
    assert loans.lend(DeviceBytes(memory)) is not None
    assert loans._held[0] is memory
    assert loans.end() is True
    assert not loans._held


def test_what_ran_meanwhile_spoils_a_loan_until_the_next(played: Played) -> None:
    loans = Loans()
    loans.begin()
    loans.touch()
    assert loans.end() is False
    loans.begin()
    assert loans.end() is True
