"""What of several hosts does not fit together, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distsession.protocol.host_facts import PACKAGES, HostFacts

__all__ = [
    "CLOCK_OFF_S",
    "TORCH",
    "HostProblem",
    "Reach",
    "check_hosts",
    "choose_addresses",
    "differing",
]

TORCH = "torch's build"

CLOCK_OFF_S = 1.0
"""Seconds by which a clock may differ from the kernel's."""

Reach = Mapping[str, Mapping[str, Mapping[str, str]]]
"""For each host, for each other one, for each of that one's addresses: why the first does not reach
it; empty if it does."""


@dataclass(frozen=True)
class HostProblem:
    """Something that is wrong with a host.

    Attributes:
        what: Which host, or which part of all.
        value: What was found.
        mend: What to do about it.
        fatal: No session can start like this.
        details: What was printed there, in lines.
    """

    what: str
    value: str
    mend: str
    fatal: bool = True
    details: str = ""


def check_hosts(
    kernel: HostFacts, hosts: Sequence[HostFacts], offsets: Mapping[str, float], reach: Reach
) -> Iterator[HostProblem]:
    """Compare the facts of hosts with those of the kernel's, and with each other.

    Args:
        kernel: Facts of the kernel's own host; without torch's, which no kernel imports.
        hosts: Of the others.
        offsets: By how many seconds each one's clock is ahead of the kernel's.
        reach: Who reaches whom.
    """
    yield from _names(hosts)
    for facts in hosts:
        yield from _python(kernel, facts)
        yield from _packages(kernel, facts)
        yield from _own_name(facts)
        yield from _folders(facts)
        yield from _clock(facts.name, offsets.get(facts.name, 0.0))
    sound = [each for each in hosts if not each.problem]
    for what, found in (
        (TORCH, {facts.name: facts.torch for facts in sound}),
        ("backends", {facts.name: ", ".join(facts.backends) for facts in sound}),
        ("NCCL", {facts.name: facts.nccl or "none" for facts in sound}),
    ):
        yield from differing(what, found)
    yield from _unreached(hosts, reach)


def _names(hosts: Sequence[HostFacts]) -> Iterator[HostProblem]:
    for name, count in Counter(each.name for each in hosts).items():
        if count > 1:
            yield HostProblem(
                name,
                f"{count} agents are on a host of this name",
                "start one on each host (mpiexec: --map-by ppr:1:node, or -ppn 1; srun: "
                "--ntasks-per-node=1); if these are different hosts, give each a name of its own",
            )


def _python(kernel: HostFacts, facts: HostFacts) -> Iterator[HostProblem]:
    if _minor(facts.python) != _minor(kernel.python):
        yield HostProblem(
            facts.name,
            f"Python {facts.python} ({facts.executable}), and {kernel.python} here",
            "functions travel as bytecode, which needs the same Python (3.11 and 3.11, say): "
            "install it there and name it with --python",
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _packages(kernel: HostFacts, facts: HostFacts) -> Iterator[HostProblem]:
    for package in PACKAGES:
        here, there = kernel.packages.get(package), facts.packages.get(package)
        if here == there or here is None:
            continue
        is_needed = package in ("distsession", "torch")
        found = f"{package} is missing" if there is None else f"{package} {there}"
        yield HostProblem(
            facts.name,
            f"{found}, and {here} here",
            f"install the same there: {facts.executable} -m pip install '{package}=={here}'",
            fatal=is_needed or there is None,
        )
    if facts.problem:
        yield HostProblem(
            facts.name, facts.problem, f"try `{facts.executable} -c 'import torch'` there"
        )


def _own_name(facts: HostFacts) -> Iterator[HostProblem]:
    loopback = [address for address in facts.resolves_to if address.startswith(("127.", "::1"))]
    found = f"resolves to {', '.join(loopback) or 'nothing'} there"
    if facts.is_name_unanswered:
        found = "is not found there, for no name server answers"
    if loopback or not facts.resolves_to:
        interface = next(iter(facts.addresses), "eth0")
        address = facts.addresses.get(interface, "its address")
        yield HostProblem(
            facts.name,
            f"its own name, {facts.hostname}, {found}",
            f"a process group would tell the others this address. Give the name {address} in "
            f"/etc/hosts there, or set GLOO_SOCKET_IFNAME={interface}, and NCCL_SOCKET_IFNAME",
            fatal=False,
        )


def _folders(facts: HostFacts) -> Iterator[HostProblem]:
    if not facts.sees_folder:
        yield HostProblem(
            facts.name,
            "the session's folder is not shared with this host",
            "files that you write here are not there: name a folder that all hosts share with "
            "--folder, or copy code and data to each",
            fatal=False,
        )
    if not facts.has_directory:
        yield HostProblem(
            facts.name,
            "the directory that you are in is not there",
            "code that opens files by relative paths, or imports modules from here, fails there: "
            "work in a directory that all hosts share",
            fatal=False,
        )


def _clock(name: str, offset: float) -> Iterator[HostProblem]:
    if abs(offset) > CLOCK_OFF_S:
        ahead = "ahead of" if offset > 0 else "behind"
        yield HostProblem(
            name,
            f"its clock is {abs(offset):,.1f} s {ahead} the one here",
            "times in logs and the timeline do not fit together, and make and caches go wrong: "
            "timedatectl set-ntp true, or chronyc makestep, there",
            fatal=False,
        )


def differing(what: str, found: Mapping[str, str]) -> Iterator[HostProblem]:
    """Say that something of torch's is not the same everywhere.

    Args:
        what: What it is.
        found: What each host has, by their names.
    """
    hosts: dict[str, list[str]] = {}
    for name, value in found.items():
        hosts.setdefault(value, []).append(name)
    if len(hosts) > 1:
        yield HostProblem(
            what,
            "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items()),
            "install the same build of torch on all hosts",
        )


def _unreached(hosts: Sequence[HostFacts], reach: Reach) -> Iterator[HostProblem]:
    for source, targets in reach.items():
        for target, addresses in targets.items():
            if addresses and all(addresses.values()):
                tried = "; ".join(f"{address}: {why}" for address, why in addresses.items())
                yield HostProblem(
                    f"{source} -> {target}",
                    f"{source} reaches no address of {target} ({tried})",
                    f"open TCP ports between the hosts: torch's store, gloo and NCCL take any free "
                    f"one (look at the firewall of {target}: nft list ruleset)",
                )


def choose_addresses(hosts: Iterable[HostFacts], reach: Reach) -> dict[str, tuple[str, str]]:
    """For each host, the interface and the address at which all others reach it.

    A host that has none, and one with nobody else to reach it, are left out.
    """
    chosen = {}
    for facts in hosts:
        seen = [targets[facts.name] for targets in reach.values() if facts.name in targets]
        for interface, address in facts.addresses.items():
            if seen and all(each.get(address, "not tried") == "" for each in seen):
                chosen[facts.name] = interface, address
                break
    return chosen
