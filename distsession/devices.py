"""Which devices of a host the ranks get: GPUs, slices of them, and other accelerators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from distsession.errors import DOCTOR_REMEDY, OptionsError
from distsession.ranks import HostInfo, ranks_text

__all__ = [
    "MULTI_RANK_NCCL",
    "NCCL_CLASSES_TORCH",
    "NCCL_NAMES",
    "Device",
    "accelerators",
    "chosen_gpus",
    "first_gpus",
    "is_nccl",
    "is_uuid",
    "shared_notes",
    "too_old_for",
]

MULTI_RANK_NCCL = (2, 30)
"""From this version on NCCL takes several ranks on one GPU, if it is told to."""

NCCL_NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
"""What ``torch.distributed`` calls NCCL: by default, and each of its three classes for it."""

NCCL_CLASSES_TORCH = (2, 15)
"""From this version of torch on, its classes for NCCL have names of their own."""

_UUID = re.compile(r"(GPU|MIG)-[\w./-]+", re.IGNORECASE)
_SHOWN = 8
"""How many devices a message names."""


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    Attributes:
        name: torch's name for it in the rank's process.
        visible: What ``CUDA_VISIBLE_DEVICES`` is in that process; empty: as in the session's own.
        gpu: The number of the GPU that it is, or is a part of; -1 where it is none.
    """

    name: str
    visible: str = ""
    gpu: int = -1


def is_nccl(backend: str) -> bool:
    """Whether a backend, such as ``"nccl2"``, is NCCL in one of its classes."""
    return backend in NCCL_NAMES


def too_old_for(backend: str, torch_version: str) -> str:
    """Says that a torch does not have a class of NCCL's, which a backend's name asks for."""
    release = ".".join(map(str, NCCL_CLASSES_TORCH))
    return (
        f"backend {backend!r} names a class for NCCL that torch has from {release} on, and this "
        f"torch is {torch_version}: use backend='nccl', or a newer torch."
    )


def is_uuid(value: object) -> bool:
    """Whether it names a GPU or a slice of one by its UUID, or by the beginning of that."""
    return isinstance(value, str) and _UUID.fullmatch(value) is not None


def first_gpus(host: HostInfo, count: int | None, uses_nccl: bool) -> list[Device]:
    """A GPU for each rank, or a slice of one where it is divided.

    Args:
        host: Where they are.
        count: How many; by default all of them, but of each GPU one slice only where NCCL cannot
            take more.
        uses_nccl: The ranks are to be joined by NCCL.

    Raises:
        OptionsError: There are not as many.
    """
    found = [
        device
        for number in range(len(host.gpus))
        for device in (_slices_of(host, number) if number in host.divided else [_gpu(host, number)])
    ]
    if not found:
        _only_slice(host, 0, "GPU 0")  # says why
    if count is None and uses_nccl and host.nccl < MULTI_RANK_NCCL:
        return list({device.gpu: device for device in reversed(found)}.values())[::-1]
    if count is not None and count > len(found):
        raise _too_few(host, count, len(found))
    return found[:count]


def chosen_gpus(host: HostInfo, chosen: Sequence[int | str]) -> list[Device]:
    """The GPUs and slices that the option ``devices`` names.

    Raises:
        OptionsError: One of them is not there, or is divided, or its name fits several.
    """
    return [
        _numbered(host, which, len(chosen)) if isinstance(which, int) else _named(host, which)
        for which in chosen
    ]


def _numbered(host: HostInfo, number: int, ranks: int) -> Device:
    if number >= len(host.gpus):
        raise OptionsError(
            f"{ranks} ranks need a GPU each, but {host.host} shows {len(host.gpus)} (there is no "
            f"GPU {number}): name those that there are, or use backend='gloo' on the CPU."
        )
    if number in host.divided:
        return _only_slice(host, number, f"GPU {number}")
    return _gpu(host, number)


def _named(host: HostInfo, name: str) -> Device:
    is_slice = name.upper().startswith("MIG-")
    uuids = [part.uuid for part in host.slices] if is_slice else list(host.gpu_uuids)
    # An exact name counts alone, also where another one goes on behind it.
    exact = [uuid for uuid in uuids if uuid.lower() == name.lower()]
    found = exact or [uuid for uuid in uuids if uuid.lower().startswith(name.lower())]
    what = "slice of a GPU" if is_slice else "GPU"
    if not found:
        there = f"{host.host} shows {_listed(uuids) or 'none'}"
        if host.gpus and not is_slice and not uuids:
            there = (
                f"the driver of {host.host} does not tell the UUIDs of its {len(host.gpus)} GPUs"
            )
        raise OptionsError(f"there is no {what} {name!r}: {there}. nvidia-smi -L lists them.")
    if len(found) > 1:
        raise OptionsError(
            f"{name!r} is not one {what} but {len(found)} of {host.host}: {_listed(found)}. Write "
            "more of the one that is meant."
        )
    if is_slice:
        return next(_slice(host, n) for n, part in enumerate(host.slices) if part.uuid == found[0])
    number = host.gpu_uuids.index(found[0])
    return _only_slice(host, number, found[0]) if number in host.divided else _gpu(host, number)


def _gpu(host: HostInfo, number: int) -> Device:
    if not host.divided:
        return Device(f"cuda:{number}", gpu=number)
    # Where a process sees a slice, CUDA shows it nothing else: so it must see this GPU alone.
    return Device("cuda:0", host.gpu_uuids[number], number)


def _slice(host: HostInfo, which: int) -> Device:
    part = host.slices[which]
    return Device("cuda:0", part.uuid, part.gpu)  # a process sees one slice at most


def _slices_of(host: HostInfo, number: int) -> list[Device]:
    return [_slice(host, which) for which, part in enumerate(host.slices) if part.gpu == number]


def _only_slice(host: HostInfo, number: int, name: str) -> Device:
    """The slice of a divided GPU that is meant by the GPU itself, if there is but one."""
    parts = _slices_of(host, number)
    if len(parts) == 1:
        return parts[0]
    if not parts:
        raise OptionsError(
            f"{name} of {host.host} is to be divided into slices (MIG), and none has been made: "
            "make some with nvidia-smi mig, or switch the mode off."
        )
    raise OptionsError(
        f"{name} of {host.host} is divided into {len(parts)} slices (MIG), and a rank gets one of "
        f"them: name slices in devices, of {_listed([part.visible for part in parts])}."
    )


def _too_few(host: HostInfo, count: int, there: int) -> OptionsError:
    slices = " or a slice of one" if host.divided else ""
    return OptionsError(
        f"{count} ranks need a GPU{slices} each, but {host.host} shows {there} of them: ask for at "
        f"most {there} ranks, or use backend='gloo' on the CPU. To try things, name one of them "
        f"more than once: devices=[0] * {count}."
    )


def _listed(uuids: Sequence[str]) -> str:
    more = f" and {len(uuids) - _SHOWN} more" if len(uuids) > _SHOWN else ""
    return ", ".join(uuids[:_SHOWN]) + more


# --- several ranks on one GPU ---------------------------------------------------------------------


def shared_notes(
    host: HostInfo,
    devices: Sequence[Device],
    uses_nccl: bool,
    first_rank: int = 0,
    where: str = "",
) -> tuple[str, ...]:
    """What to say of GPUs that several ranks share; nothing where none do.

    Args:
        host: Where they are.
        devices: Of its ranks.
        uses_nccl: The ranks are to be joined by NCCL.
        first_rank: Of that host.
        where: Stands behind the names of GPUs.

    Raises:
        OptionsError: NCCL does not take them so.
    """
    by_gpu: dict[int, list[int]] = {}
    by_device: dict[Device, list[int]] = {}
    for rank, device in enumerate(devices, first_rank):
        by_gpu.setdefault(device.gpu, []).append(rank)
        by_device.setdefault(device, []).append(rank)
    crowded = {gpu: ranks for gpu, ranks in by_gpu.items() if gpu >= 0 and len(ranks) > 1}
    if crowded and uses_nccl and host.nccl < MULTI_RANK_NCCL:
        gpu, ranks = next(iter(crowded.items()))
        version = ".".join(map(str, host.nccl)) or "unknown"
        raise OptionsError(
            f"{ranks_text(ranks)} are on GPU {gpu}{where}: NCCL takes several ranks on one GPU "
            f"from version {'.'.join(map(str, MULTI_RANK_NCCL))} on, and this torch "
            f"({host.torch_version}) has {version}. backend='cuda:gloo' takes them."
        )
    return tuple(
        f"R{ranks_text(ranks)[1:]} share {_title(device)}{where}, its memory and its time: this is "
        "for trying things, not for speed."
        for device, ranks in by_device.items()
        if device.gpu >= 0 and len(ranks) > 1
    )


def _title(device: Device) -> str:
    return f"the slice {device.visible}" if "MIG-" in device.visible else f"GPU {device.gpu}"


# --- other accelerators ---------------------------------------------------------------------------


def accelerators(
    host: HostInfo,
    kind: str,
    count: int | None,
    chosen: Sequence[int | str] | None,
    backend: str,
) -> list[Device]:
    """A device of some type for each rank.

    Args:
        host: Where they are.
        kind: Of device, as torch calls it.
        count: How many; by default all of them.
        chosen: Which, if the option ``devices`` names them.
        backend: Which needs them.

    Raises:
        OptionsError: There are not as many.
    """
    there = dict(host.accelerators).get(kind, 0)
    if not there:
        raise OptionsError(
            f"backend {backend!r} needs devices of the type {kind}, and {host.host} shows none: "
            "use backend='gloo', or name the module that brings them in preload=[...].",
            remedy=DOCTOR_REMEDY,
        )
    numbers = [which for which in chosen or () if isinstance(which, int)]
    if len(numbers) < len(chosen or ()):
        raise OptionsError(
            f"devices={list(chosen or ())} has names of GPUs, but backend {backend!r} runs on "
            f"devices of the type {kind}: give their numbers, 0 to {there - 1}."
        )
    numbers = numbers or list(range(there if count is None else count))
    if missing := [number for number in numbers if number >= there]:
        raise OptionsError(
            f"{len(numbers)} ranks with backend {backend!r} need a device of the type {kind} each, "
            f"but {host.host} shows {there} (there is no {kind}:{missing[0]}): ask for at most "
            f"{there} ranks, or use backend='gloo' on the CPU."
        )
    return [Device(f"{kind}:{number}") for number in numbers]
