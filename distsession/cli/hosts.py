"""``distsession doctor --launcher ssh --hosts a,b``: what keeps a session from several hosts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from distsession.cli.finding import Finding
from distsession.errors import LaunchError, OptionsError
from distsession.host_plan import HOST_LAUNCHERS, HostPlan
from distsession.options import OF_HOSTS

__all__ = ["add_host_arguments", "check_hosts_of", "take_plan"]


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the doctor's parser what it takes, beside a session's options, to look at hosts."""
    group = parser.add_argument_group(
        "several hosts",
        "With --launcher ssh, slurm, mpi, sge, pbs, lsf, htcondor or command an agent is started "
        "on each host. They are compared with this one and with each other, and ended. --nodes "
        "says how many. Flags that are not named here are the launcher's: --partition gpu.",
    )
    group.add_argument("--option", metavar="NAME=VALUE", action="append",
                       help="an option of the launcher, whatever its name")  # fmt: skip
    group.add_argument("--address", metavar="ADDRESS", action="append",
                       help="an address of this host at which the others reach it")  # fmt: skip
    group.add_argument("--start-within", metavar="SECONDS", type=float,
                       help="that agents have to come, once they run (default: 60)")  # fmt: skip


HOST_FLAGS = (*OF_HOSTS, "option", "address", "start_within")


def take_plan(given: dict[str, Any]) -> HostPlan | None:
    """Take what is about several hosts out of the flags; None if they are of a session here.

    Raises:
        OptionsError: Flags do not fit together.
    """
    flags = {name: given.pop(name) for name in HOST_FLAGS if name in given}
    if given.get("launcher") not in HOST_LAUNCHERS:
        if flags:
            flag = next(iter(flags)).replace("_", "-")
            raise OptionsError(
                f"--{flag} is for several hosts: give --launcher as well, one of "
                f"{', '.join(HOST_LAUNCHERS)}."
            )
        return None
    launcher, nodes = given.pop("launcher"), given.pop("nodes", 0)
    if given:
        flag = next(iter(given)).replace("_", "-")
        raise OptionsError(
            f"{flag} is for a session, and the doctor starts none with --launcher {launcher}: it "
            "looks at the hosts only."
        )
    options = dict(flags.pop("launcher_options", {}))
    for text in flags.pop("option", ()):
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionsError(f"--option {text}: it takes NAME=VALUE.")
        options[name.strip().lstrip("-")] = value
    addresses = (*flags.pop("addresses", ()), *flags.pop("address", ()))
    if "start_within" in flags:
        flags["timeout"] = flags.pop("start_within")
    return HostPlan(launcher=launcher, nodes=nodes, options=options, addresses=addresses, **flags)


def check_hosts_of(plan: HostPlan) -> Iterator[Finding]:
    """Start an agent on each host, say what does not fit, and end them."""
    try:
        from distsession.cluster.hosts import Hosts
    except ImportError as error:
        yield Finding("hosts", str(error), "install what is missing above", fatal=True)
        return
    began = time.perf_counter()
    try:
        with Hosts(plan, _tell) as hosts:
            hosts.start()
            yield from _started(hosts, time.perf_counter() - began)
            yield from _compared(hosts)
    except LaunchError as error:
        remedy, error.remedy = error.remedy, ""
        yield Finding(plan.launcher, str(error), remedy or "mend what it says", fatal=True)


def _tell(text: str) -> None:
    print(f"distsession: waiting for {text}", file=sys.stderr, flush=True)


def _started(hosts: Any, seconds: float) -> Iterator[Finding]:
    if hosts.job:
        yield Finding("job", hosts.job)
    for link in hosts.links:
        way = f"comes to {link.address}" if link.address else "cannot come here, was gone to"
        yield Finding(link.name, f"an agent (pid {link.pid}) {way}, after {seconds:.1f} s")


def _compared(hosts: Any) -> Iterator[Finding]:
    from distsession.cluster.hosts import kernel_facts
    from distsession.protocol.host_checks import check_hosts, choose_addresses

    facts = hosts.facts()
    reach = hosts.reach(facts)
    for one in facts:
        yield Finding(one.name, _text(one))
    for name, (interface, address) in choose_addresses(facts, reach).items():
        yield Finding(name, f"all others reach it at {address} ({interface})")
    found = check_hosts(kernel_facts(), facts, hosts.offsets(), reach)
    for problem in (*hosts.problems, *found):
        yield Finding(
            problem.what, problem.value, problem.mend, problem.fatal, details=problem.details
        )
    yield Finding(
        "between the hosts",
        "gloo and NCCL are not encrypted and ask nobody who they are, as under torchrun: whoever "
        "reaches these addresses can read and change tensors",
    )


def _text(facts: Any) -> str:
    gpus = f"{len(facts.gpus)} GPUs" if facts.gpus else f"no GPU, {facts.cpus} CPUs"
    versions = (
        f"Python {facts.python}, torch {facts.torch or 'missing'}, NCCL {facts.nccl or 'none'}"
    )
    addresses = ", ".join(f"{name} {address}" for name, address in facts.addresses.items())
    return f"{gpus}; {versions}; {addresses}"
