"""Devices that are of no more use to their process.

Some errors of a device (an illegal memory access, a failed assertion in a kernel) are reported by
every use of it from then on, until the process ends. Nothing but another process helps.
"""

from __future__ import annotations

import torch

__all__ = ["lost_text"]


def lost_text(rank: int, device: torch.device) -> str:
    """What to say of a rank whose device is lost; empty where it is not.

    Asks the device without waiting for it: what it was given may never end.

    Args:
        rank: The rank.
        device: Its own.
    """
    if device.type == "cpu":
        return ""
    try:
        torch.accelerator.current_stream(device).query()
    except RuntimeError:
        return (
            f"The device {device} of rank {rank} is lost to its process: every use of it raises "
            f"this. session.restart([{rank}]) replaces the rank; restore=[...] copies variables "
            "from another one."
        )
    except (AttributeError, NotImplementedError):  # not every device type has streams
        return ""
    return ""
