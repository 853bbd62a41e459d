"""What is known of a host before a session starts on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["PACKAGES", "HostFacts", "facts_of"]

PACKAGES = ("distsession", "torch", "ipyparallel", "pyzmq", "cloudpickle", "numpy")
"""Packages whose versions are compared: what hosts send each other is made and read by them."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What an agent has found on its host; all of it is data that JSON has.

    Attributes:
        name: What the launcher calls the host.
        hostname: What it calls itself.
        resolves_to: The addresses of that name, as the host itself sees it; empty without any.
        is_name_unanswered: It is not known yet, for no name server has answered.
        addresses: For each of its interfaces that is up, its address; without the loopback.
        python: The version.
        executable: The Python that runs there.
        packages: The versions of ``PACKAGES``; None for one that is not there.
        problem: Why torch cannot be used there; empty if it can.
        torch: ``torch.__version__``, which says the build, too.
        backends: Backends of ``torch.distributed``.
        nccl: NCCL's version, such as ``"2.28.9"``; empty without it.
        gpus: How many, and which.
        cpus: Processors that the agent may use.
        sees_folder: Whether it sees what the kernel has written into the session's folder.
        has_directory: Whether the kernel's working directory is there, too.
        port: Where it listens for the other hosts' trial.
    """

    name: str
    hostname: str
    resolves_to: tuple[str, ...] = ()
    is_name_unanswered: bool = False
    addresses: Mapping[str, str]
    python: str
    executable: str
    packages: Mapping[str, str | None]
    problem: str = ""
    torch: str = ""
    backends: tuple[str, ...] = ()
    nccl: str = ""
    gpus: tuple[str, ...] = ()
    cpus: int = 0
    sees_folder: bool = True
    has_directory: bool = True
    port: int = 0


def facts_of(body: Mapping[str, Any]) -> HostFacts:
    """The facts that came in a message; what this version does not know is left out.

    Raises:
        ValueError: Something that is needed is missing, or is of another kind.
    """
    known = {field.name: body[field.name] for field in fields(HostFacts) if field.name in body}
    for name in ("resolves_to", "backends", "gpus"):
        known[name] = tuple(map(str, known.get(name, ())))
    try:
        facts = HostFacts(**known)
        dict(facts.addresses), dict(facts.packages), int(facts.port)
    except (TypeError, ValueError) as error:
        raise ValueError(f"these are no facts of a host: {error}") from None
    return facts
