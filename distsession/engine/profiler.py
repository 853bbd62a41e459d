"""torch's profiler around a cell."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["profiled"]


@contextmanager
def profiled(keep: Callable[[bytes], None]) -> Iterator[None]:
    """Profile what runs within, also if it fails.

    Args:
        keep: Gets what the profiler has written: a trace in Chrome's format.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write its own steps to stderr
    from torch import profiler

    kinds = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        kinds.append(profiler.ProfilerActivity.CUDA)
    running = profiler.profile(activities=kinds)
    running.start()
    try:
        yield
    finally:
        running.stop()
        keep(_written(running))


def _written(running: torch.profiler.profile) -> bytes:
    with tempfile.TemporaryDirectory(prefix="distsession-profile-") as folder:
        path = os.path.join(folder, "trace.json")
        running.export_chrome_trace(path)
        with open(path, "rb") as file:
            return file.read()
