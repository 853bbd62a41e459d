"""The memory of a tensor, for whoever reads its bytes. torch itself is not needed for it."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["bytes_of"]


def bytes_of(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor; a copy of it where it is an accelerator's.

    Without numpy, which torch's own way to it needs.

    Raises:
        ValueError: It has no memory, as a parameter whose storage has been given back.
    """
    tensor = tensor.detach().cpu()
    count = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr()
    if count and not address:
        raise ValueError("the tensor has no memory")
    memory = (ctypes.c_ubyte * count).from_address(address or 1)
    memory.owner = tensor  # lives as long as the view
    return memoryview(memory).cast("B")
