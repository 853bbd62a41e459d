"""Which rank goes on which host and device, with which backend: from options and hosts to ranks."""

from __future__ import annotations

import bisect
import difflib
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distsession.devices import (
    Device,
    accelerators,
    chosen_gpus,
    first_gpus,
    is_nccl,
    shared_notes,
    too_old_for,
)
from distsession.errors import DOCTOR_REMEDY, OptionsError
from distsession.options import SessionOptions, uneven_text
from distsession.ranks import HostInfo

__all__ = ["RankPlan", "plan_ranks"]


@dataclass(frozen=True)
class RankPlan:
    """How many ranks the hosts get, on which devices, with which backend.

    Attributes:
        devices: torch's name of each rank's device.
        backend: Of the process group.
        threads: Of a rank, on each node.
        counts: The number of ranks of each node; each has a block of them, in the nodes' order.
        visible: What each rank has for ``CUDA_VISIBLE_DEVICES``; empty where that is as it is here.
        is_shared: A GPU, or slices of one, have several ranks.
        notes: Sentences for the user.
    """

    devices: tuple[str, ...]
    backend: str
    threads: tuple[int, ...]
    counts: tuple[int, ...]
    visible: tuple[str, ...] = ()
    is_shared: bool = False
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.counts)

    def node_of(self, rank: int) -> int:
        return bisect.bisect_right(self._ends, rank)

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self.counts))

    def ranks_of(self, node: int) -> range:
        first = sum(self.counts[:node])
        return range(first, first + self.counts[node])


@dataclass(frozen=True)
class _Placement:
    """The ranks that one machine gets."""

    backend: str
    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        gpus = [device.gpu for device in self.devices if device.gpu >= 0]
        return len(set(gpus)) < len(gpus)


def plan_ranks(options: SessionOptions, hosts: Sequence[HostInfo]) -> RankPlan:
    """Fit the options to what the hosts have.

    A backend that serves CUDA puts one rank on each GPU. ``gloo`` alone means the CPU, also where
    there are GPUs; ``cuda:gloo`` asks for them.

    Args:
        options: What the user wants.
        hosts: Each host, in the order of their ranks. Where one machine plays all nodes, the first
            stands for it.

    Raises:
        OptionsError: The hosts cannot give what the options ask for.
    """
    if options.host_plan is None:
        whole = sum(options.counts) if options.counts else None
        placed = _place(options, hosts[0], whole, max(2, options.nodes))
        world = len(placed.devices)
        if options.counts is None and world % options.nodes:
            raise OptionsError(uneven_text(world, options.nodes))
        counts = options.counts or (world // options.nodes,) * options.nodes
        threads = [max(1, hosts[0].cpus // world)] * options.nodes
        placements = [placed]
    else:
        placements = _place_on_hosts(options, hosts)
        counts = tuple(len(placed.devices) for placed in placements)
        threads = [max(1, host.cpus // count) for host, count in zip(hosts, counts, strict=True)]
    devices = [device for placed in placements for device in placed.devices]
    visible = tuple(device.visible for device in devices)
    return RankPlan(
        tuple(device.name for device in devices),
        placements[0].backend,
        (options.threads,) * options.nodes if options.threads else tuple(threads),
        counts,
        visible if any(visible) else (),
        any(placed.is_shared for placed in placements),
        tuple(note for placed in placements for note in placed.notes),
    )


def _place_on_hosts(options: SessionOptions, hosts: Sequence[HostInfo]) -> list[_Placement]:
    """What each host gets.

    Raises:
        OptionsError: One of them cannot give it, or they do not fit together.
    """
    with_gpus = [host.host for host in hosts if host.gpus]
    without = [host.host for host in hosts if not host.gpus]
    if options.backend is None and with_gpus and without:
        raise OptionsError(
            f"{', '.join(with_gpus)} {_have(with_gpus)} GPUs and {', '.join(without)} "
            f"{_have(without)} none, but all ranks have one backend: backend='gloo' puts all of "
            f"them on the CPU; or leave out {', '.join(without)}."
        )
    counts = options.counts or (None,) * len(hosts)
    placements: list[_Placement] = []
    for host, count in zip(hosts, counts, strict=True):
        first = sum(len(placed.devices) for placed in placements)
        try:
            placements.append(_place(options, host, count, 2, first, f" of {host.host}"))
        except OptionsError as error:
            if count is None or options.ranks_per_host or len({len(h.gpus) for h in hosts}) == 1:
                raise
            there = ", ".join(f"{each.host} {len(each.gpus)}" for each in hosts)
            raise OptionsError(
                f"ranks={options.ranks} are {count} on each of {len(hosts)} hosts, whose numbers "
                f"of GPUs differ ({there}): say how many each is to have, as "
                f"ranks_per_host={[len(each.gpus) for each in hosts]}, or leave out ranks= for one "
                f"on each GPU. {error}"
            ) from None
    return placements


def _have(hosts: Sequence[str]) -> str:
    return "has" if len(hosts) == 1 else "have"


def _place(
    options: SessionOptions,
    host: HostInfo,
    count: int | None,
    least: int,
    first: int = 0,
    where: str = "",
) -> _Placement:
    """The devices of the ranks of one machine.

    Args:
        options: What the user wants.
        host: The machine.
        count: How many ranks it gets; None for one on each GPU.
        least: How many it then gets on the CPU.
        first: The first of them, for messages.
        where: Stands behind the names of GPUs in messages.

    Raises:
        OptionsError: The machine cannot give it.
    """
    pairs = _backend_pairs(options.backend, host)
    kind = _accelerator(options, host, pairs)
    backend = ",".join(":".join(filter(None, pair)) for pair in pairs)  # torch takes no spaces
    backend = backend or ("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        uses_nccl = not pairs or any(is_nccl(name) for _, name in pairs)
        if options.devices:
            gpus = chosen_gpus(host, options.devices)
        else:
            gpus = first_gpus(host, count, uses_nccl)
        return _Placement(backend, tuple(gpus), shared_notes(host, gpus, uses_nccl, first, where))
    if kind:
        found = accelerators(host, kind, count, options.devices, backend)
        return _Placement(backend, tuple(found))
    if options.devices:
        raise OptionsError(
            f"devices={list(options.devices)} names GPUs, but "
            + (
                f"{host.host} shows none."
                if not host.gpus
                else f"backend {backend!r} runs on the CPU: leave one of the two out."
            )
        )
    return _Placement(backend, (Device("cpu"),) * (count or least))


def _backend_pairs(backend: str | None, host: HostInfo) -> list[tuple[str, str]]:
    """The device type and name of each backend; no device type where one name stands alone.

    Raises:
        OptionsError: This torch has no such backend, or not for that type of device.
    """
    if backend is None:
        return []
    serves = dict(host.backends)
    pairs: list[tuple[str, str]] = []
    for part in backend.lower().split(","):
        device, colon, name = (piece.strip() for piece in part.rpartition(":"))
        if name not in serves and is_nccl(name):
            raise OptionsError(too_old_for(name, host.torch_version))
        if name not in serves:
            raise OptionsError(
                f"backend {name!r} is not one that this torch ({host.torch_version}) offers: "
                f"it has {', '.join(sorted(serves))}.{_near(name, serves)} A backend of your own "
                "is registered by a module named in preload=[...]."
            )
        if colon and device not in serves[name]:
            raise OptionsError(
                f"backend={backend!r} is not possible: {name} serves "
                f"{' and '.join(serves[name])}, not {device!r}."
            )
        pairs.append((device, name))
    devices = [device for device, _ in pairs]
    if len(set(devices)) < len(devices) or (len(devices) > 1 and "" in devices):
        raise OptionsError(
            f"backend={backend!r} is not possible: it takes one name, or one for each type of "
            "device, such as 'cpu:gloo,cuda:nccl'."
        )
    return pairs


def _near(name: str, known: Iterable[str]) -> str:
    """Asks whether something like it was meant."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def _accelerator(options: SessionOptions, host: HostInfo, pairs: list[tuple[str, str]]) -> str:
    """The type of device that the ranks go on; empty for the CPU.

    Raises:
        OptionsError: A backend needs a GPU, and the host has none; or two types are asked for.
    """
    serves = dict(host.backends)
    served = [(device,) if device else serves[name] for device, name in pairs]
    others = [kinds[0] for kinds in served if kinds and not {"cpu", "cuda"} & set(kinds)]
    if not others:
        return "cuda" if _wants_gpu(options, host, pairs) else ""
    if any(device == "cuda" for device, _ in pairs) or len(set(others)) > 1:
        raise OptionsError(
            f"backend={options.backend!r} is not possible: a rank has one device, of one type."
        )
    return others[0]


def _wants_gpu(options: SessionOptions, host: HostInfo, pairs: list[tuple[str, str]]) -> bool:
    """Whether the ranks go on GPUs.

    Raises:
        OptionsError: A backend needs one, and the host has none.
    """
    if not pairs:
        return bool(host.gpus)
    serves = dict(host.backends)
    if not host.gpus and any(d == "cuda" or "cpu" not in serves[name] for d, name in pairs):
        raise OptionsError(
            f"backend {options.backend!r} needs a GPU, and {host.host} shows none: "
            "use backend='gloo'.",
            remedy=DOCTOR_REMEDY,
        )
    return bool(host.gpus) and any(
        device == "cuda" or (not device and "cuda" in serves[name] and name != "gloo")
        for device, name in pairs
    )
