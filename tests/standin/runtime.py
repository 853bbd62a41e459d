"""``torch.standin``: what libraries ask a device's module for."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.standin.extension import native

DeviceLike = torch.device | int | str | None

_chosen_in = 0
"""The process in which a device was chosen."""


def index_of(device: DeviceLike) -> int:
    if device is None:
        return native.current_device()
    if isinstance(device, int):
        return native.current_device() if device < 0 else device
    found = torch.device(device).index
    return native.current_device() if found is None else found


def init() -> None:
    pass


def is_initialized() -> bool:
    """Whether a device was chosen, or a stream was used, whose thread a fork would lose."""
    return _chosen_in == os.getpid() or bool(native.streams_in_use())


def is_available() -> bool:
    return native.device_count() > 0


def _is_in_bad_fork() -> bool:
    return native.is_in_bad_fork()


def device_count() -> int:
    return native.device_count()


def current_device() -> int:
    return native.current_device()


def set_device(device: DeviceLike) -> None:
    global _chosen_in
    native.set_device(index_of(device))
    _chosen_in = os.getpid()


def get_device_name(device: DeviceLike = None) -> str:
    return "Stand-in"


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    return 0, 0


def synchronize(device: DeviceLike = None) -> None:
    """Wait in C, without the interpreter's lock, for all streams of the device."""
    native.synchronize(index_of(device))


class device:
    """Makes a device the current one for a block."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = native.current_device()
        native.set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        native.set_device(self.prev_idx)


Stream = torch.Stream
Event = torch.Event


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("standin", index_of(device)))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=DEVICE_TYPE)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


class stream:
    """Makes a stream the current one of its device for a block."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self.device = native.current_device()
            native.set_device(self.stream.device_index)
            self.previous = current_stream()
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            set_stream(self.previous)
            native.set_device(self.device)


StreamContext = stream


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(index_of(device)))


def memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.memory_allocated(index_of(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.max_memory_allocated(index_of(device))


def memory_reserved(device: DeviceLike = None) -> int:
    return torch.accelerator.memory_reserved(index_of(device))


def max_memory_reserved(device: DeviceLike = None) -> int:
    return torch.accelerator.max_memory_reserved(index_of(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes. ``DISTSESSION_STANDIN_MEMORY`` is how many a device has."""
    free, total = native.memory_info(index_of(device))
    return free, total


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def manual_seed(seed: int) -> None:
    native.generator(-1).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for each in range(device_count()):
        native.generator(each).manual_seed(seed)


def initial_seed() -> int:
    return native.generator(-1).initial_seed()


def get_rng_state(device: DeviceLike = "standin") -> torch.Tensor:
    return native.generator(index_of(device)).get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = "standin") -> None:
    native.generator(index_of(device)).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def _break(
    device: DeviceLike = None, why: str = "an illegal memory access was encountered"
) -> None:
    """Break the device as a kernel's illegal access breaks a GPU.

    Every later use of it raises, until the process ends.
    """
    native.break_device(index_of(device), why)


DEVICE_TYPE = 20
"""PrivateUse1 in torch's list of devices' types."""
