"""The options of a session, each declared once.

One field of :class:`SessionOptions` is a keyword of ``Session(...)``, a flag of
``%session start`` and of the command line (``--start-timeout``), and an environment variable
(``DISTSESSION_START_TIMEOUT``). What is given wins over the environment, and that over the default.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import itertools
import math
import os
import re
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from distsession.devices import is_uuid
from distsession.errors import OptionsError
from distsession.host_plan import HOST_LAUNCHERS, HostPlan

__all__ = [
    "OF_HOSTS",
    "SessionOptions",
    "add_arguments",
    "check_names",
    "declare",
    "duration_text",
    "option_sources",
    "read_bool",
    "read_duration",
    "read_environment",
    "read_size",
    "resolve_options",
    "split_launcher_options",
    "uneven_text",
]

PREFIX = "DISTSESSION_"
LAUNCHERS = ("local", "inline", *HOST_LAUNCHERS)
CHECKS = ("shared", "strict", "detail", "off")
GROUPS = ("session", "torch")
DEVICE_IPC = ("auto", "off")
IPYPARALLEL = ("lazy", "eager")
DEVICES = "a list of GPU numbers, UUIDs (GPU-...) and slices (MIG-...)"
COUNTS = "a list of whole numbers of at least 1, one for each host"
LAUNCHER_OPTIONS = "names and values that are texts, such as {'partition': 'gpu'}"
OF_HOSTS = ("hosts", "launcher_options", "command", "addresses", "python", "folder")
"""Options that only launchers for several hosts have a use for."""
LONGEST_NAME = 64
"""Characters of the name of a session."""

LEAST_OUTPUT_BYTES = 1 << 20
"""What is kept of each rank's output at least: an error shows the last lines."""

DURATIONS = "12h, 90m, 2d, 1h30m or 45s"
SIZES = "1G, 500M or a number of bytes"
NAMES = (
    f"a word of at most {LONGEST_NAME} characters, without blanks and slashes, that begins with "
    "no hyphen and is no number, which would be a pid"
)


def declare(default: Any, help: str, read: Any, **extra: Any) -> Any:
    """A field of a dataclass that is an option.

    Args:
        default: Its value where none is given.
        help: What it takes, for command lines and messages.
        read: Makes its value of a text.
        **extra: More that a command line is told: ``choices``.
    """
    return field(default=default, metadata={"help": help, "read": read, **extra})


def _read_devices(text: str) -> tuple[int | str, ...]:
    parts = [part.strip(" \"'") for part in text.strip("[]() ").split(",")]
    return tuple(part if is_uuid(part) else _read_device(part) for part in parts if part)


def _read_device(text: str) -> int:
    """The number of a GPU.

    Raises:
        Unreadable: It is none; the message says what to type instead.
    """
    if text.isdecimal():
        return int(text)
    kind, colon, number = text.partition(":")
    if colon and number.isdecimal():
        raise Unreadable(f"of {text} it takes the number alone: {number}")
    if kind.startswith("cpu"):
        raise Unreadable(f"it takes GPUs, not {text}: without GPUs, --backend gloo is all it needs")
    raise Unreadable(f"{text} is no GPU: it takes {DEVICES}")


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _read_counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("[]() ").split(",") if part.strip())


def _read_pairs(text: str) -> dict[str, str]:
    """``NAME=VALUE``, with blanks between several, and quotes where a value has blanks."""
    try:
        words = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:  # an open quote
        raise Unreadable(f"{error}: it takes NAME=VALUE, with blanks between several") from None
    return {name.lstrip("-"): value for name, _, value in words}


def read_bool(text: str) -> bool:
    """Yes or no, in any of the ways in which people write it."""
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off", ""):
        raise ValueError(text)
    return word in ("1", "true", "yes", "on")


class Unreadable(argparse.ArgumentTypeError, ValueError):
    """A text cannot be read; the message says what is taken, on a command line, too."""


_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(
    " ?".join(rf"(?:(?P<{unit}>[\d.]+){unit})?" for unit in _SECONDS) + r"|(?P<number>[\d.]+)"
)
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(?P<number>[\d.]+) ?(?P<unit>[kmgt]?)(?:i?b)?")
_ENDLESS = ("forever", "always", "never", "inf", "infinity", "infinite", "endless", "unlimited")


def read_duration(text: str) -> float:
    """Seconds, of ``12h``, ``90m``, ``2d``, ``1h30m`` or ``45s``; a number alone may only be 0.

    Raises:
        ValueError: It is none of these.
    """
    word = text.strip().lower()
    if word in _ENDLESS:
        raise Unreadable("a lease has an end: give one that is long enough, such as 30d")
    found = _DURATION.fullmatch(word)
    if found is not None and found["number"] and found["number"].strip("0."):
        raise Unreadable(f"it needs a unit: {word}h, {word}m or {word}s")
    if found is not None and found[0]:
        parts = ((unit, part) for unit, part in found.groupdict().items() if part)
        with contextlib.suppress(ValueError):
            return sum(_SECONDS.get(unit, 1) * float(part) for unit, part in parts)
    raise Unreadable(f"it takes {DURATIONS}")


def duration_text(seconds: float) -> str:
    """A duration as a person types it, to the second: ``1h30m``."""
    left, parts = round(seconds), []
    for unit, length in _SECONDS.items():
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def read_size(text: str) -> int:
    """Bytes, of ``1G``, ``500M``, ``64k``, or a plain number of bytes; k is 1024.

    Raises:
        ValueError: It is none of these.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is not None:
        with contextlib.suppress(ValueError):
            return round(float(found["number"]) * _BYTES[found["unit"]])
    raise Unreadable(f"it takes {SIZES}")


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What a session is made of.

    Attributes:
        ranks: Number of ranks. Default: one per visible GPU, or 2 where there is none; of each
            host.
        nodes: Number of hosts, each with an agent and as many ranks as the others. With
            ``launcher="local"`` this machine plays them: payloads travel between nodes as between
            hosts. Default: 1, as many as ``hosts`` or ``ranks_per_host`` name, or, within a job of
            Slurm's, those of the job.
        backend: Process-group backend, any name that torch knows, also one for each device type
            (``"cpu:gloo,cuda:nccl"``). Default: nccl on GPUs, gloo on CPU.
        devices: The GPUs to use, in the order of the local ranks: numbers, UUIDs (``"GPU-5f2a"``,
            of which the beginning is enough) and slices (``"MIG-..."``). One may be named more than
            once, and then has several ranks. Of several hosts, these of each. Default: the first.
        timeout: Seconds that a collective may wait. Default: torch's own (30 min, NCCL 10 min).
        seed: Seed of torch, numpy and random on every rank. Default: a fresh one for each rank.
        seed_per_rank: Give rank r the seed ``seed + r`` instead of the same one.
        threads: Threads of each rank for operations on the CPU. Default: the processors, shared
            out evenly.
        preload: Modules to import before the ranks are forked, so that all share them.
        launcher: ``"local"`` starts processes on this machine; ``"inline"`` runs one rank within
            the calling process, for debugging. ``"ssh"``, ``"slurm"``, ``"mpi"``, ``"sge"``,
            ``"pbs"``, ``"lsf"``, ``"htcondor"`` and ``"command"`` start an agent on each of several
            hosts, and through it the ranks.
        start_timeout: Seconds until a start that does not come about is given up.
        check: How the ranks compare their collectives: ``"shared"`` before each one, in memory
            that they share: with gloo all ranks meet before it begins, with a backend that waits
            on the device (NCCL) nobody waits, and who comes later sees what does not match;
            ``"strict"`` lets all ranks meet there as well, so that no tensor is changed, at the
            cost of a wait before each; ``"detail"`` through the group itself, as torch does with
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (several times slower); ``"off"`` not at all.
        groups: Whose process groups code gets: ``"session"`` for those that outlive a Stop, or
            ``"torch"`` for torch's own: groups and modules have to be made again after a Stop.
            What these do is seen and compared from torch 2.15 on, but for reduce ops, sizes of
            parts and messages; with an older torch nothing of it is.
        device_ipc: How tensors of a rank's device get to another rank of the same host, in
            ``restart(restore=...)``: ``"auto"`` straight from device to device, where driver and
            device allow that, else through the host's memory; ``"off"`` always through that.
        hang_grace: Seconds after which ranks are freed that wait in a collective which can never
            complete, since the ranks that it misses have ended their part. 0 lets them wait.
        ipyparallel: When ipyparallel's controller starts and the ranks register with it:
            ``"lazy"`` at the first ``%px`` or ``session.client``; ``"eager"`` behind the start of
            the session, so that the first of these has less to wait for.
        text_bars: Show progress bars that are widgets as lines of text, for front ends that have
            no widgets. On more than eight ranks they always are.
        keep: How long the ranks stay after the last kernel that had them has gone, as seconds or
            as ``"12h"``, ``"90m"``, ``"2d"``, ``"1h30m"``: the lease, which has an end. Default: 0,
            they end with the kernel.
        name: What the session is called, where it is attached to and in what is told of it. One
            word. Default: a number, and the name of its folder if it is kept.
        keep_idle: How long the ranks of a session that is kept may all be idle while nobody has
            it; then they end before the lease does. 0 for as long as the lease.
        keep_output: Bytes of text that are kept of what each rank writes, on stdout and on stderr,
            also as ``"1G"`` or ``"500M"``; of more than that the front is given back to the disk.
        hosts: In the order of their ranks. For ``launcher="ssh"``: ``"host"``, ``"user@host"`` or
            ``"user@host:port"``, or names of the user's ssh configuration; for ``"command"``,
            whatever the command understands.
        ranks_per_host: How many ranks each host has, or each node that this machine plays, in
            their order, where they are not to have as many as the others.
        launcher_options: What the launcher takes: for schedulers and ssh options of ``sbatch`` (or
            ``srun``), ``qsub``, ``bsub`` and ``ssh -o``, such as ``{"partition": "gpu"}``, and for
            ssh ``config``, a file; for HTCondor lines of a submit description; for MPI ``command``
            and ``args``. On a command line each may be a flag: ``--partition gpu``.
        command: For ``launcher="command"``: what starts the agents, with ``{agent}`` for an agent's
            command line. It is run once for each of ``hosts``, with its name as ``{host}``, or once
            for all of ``nodes``. With ``{keys}``, the path of the file with the keys, agents read
            them from their standard input.
        addresses: Of this machine, at which the agents reach it. Default: those of all interfaces.
        python: The Python of the other hosts. Default: the path of the one here.
        folder: A folder that all hosts share, where the launcher needs one. Default:
            ``~/.distsession``.
    """

    ranks: int | None = declare(None, "number of ranks", int)
    nodes: int = declare(None, "number of hosts, or of nodes that this machine plays", int)
    backend: str | None = declare(None, "process-group backend, such as gloo or nccl", str)
    devices: tuple[int | str, ...] | None = declare(
        None, "GPUs to use, in local rank order: 0,2 or GPU-5f2a,MIG-31d0", _read_devices
    )
    timeout: float | None = declare(None, "seconds that a collective may wait", float)
    seed: int | None = declare(None, "seed for torch, numpy and random", int)
    seed_per_rank: bool = declare(False, "give rank r the seed SEED + r", read_bool)
    threads: int | None = declare(None, "CPU threads per rank", int)
    preload: tuple[str, ...] = declare((), "modules to import before forking: a,b", _read_names)
    launcher: str = declare("local", f"one of {', '.join(LAUNCHERS)}", str, choices=LAUNCHERS)
    start_timeout: float = declare(120.0, "seconds until a start is given up", float)
    check: str = declare("shared", f"one of {', '.join(CHECKS)}", str, choices=CHECKS)
    groups: str = declare("session", f"one of {', '.join(GROUPS)}", str, choices=GROUPS)
    device_ipc: str = declare("auto", f"one of {', '.join(DEVICE_IPC)}", str, choices=DEVICE_IPC)
    hang_grace: float = declare(2.0, "seconds until a certain deadlock is ended; 0: never", float)
    ipyparallel: str = declare(
        "lazy", "start its controller when it is first used, or at once (eager)", str,
        choices=IPYPARALLEL,
    )  # fmt: skip
    text_bars: bool = declare(False, "progress bars as text, not as widgets", read_bool)
    keep: float = declare(
        0.0, "how long the ranks outlive the kernel: 12h, 90m, 2d; 0: not at all", read_duration
    )
    name: str | None = declare(None, "what the session is called", str)
    keep_idle: float = declare(
        0.0, "how long they may be idle meanwhile: 2h; 0: as long as they are kept", read_duration
    )
    keep_output: int = declare(
        1 << 30, "bytes that are kept of what each rank writes: 1G, 500M", read_size
    )
    hosts: tuple[str, ...] = declare(
        (), "for ssh, a,user@b,user@c:2222; or for command", _read_names
    )
    ranks_per_host: tuple[int, ...] | None = declare(
        None, "ranks of each host, where they differ: 8,4", _read_counts
    )
    launcher_options: Mapping[str, str] | None = declare(
        None, "options of sbatch, qsub, ssh -o or mpiexec: 'partition=gpu qos=high'", _read_pairs
    )
    command: str | None = declare(
        None, "for the launcher command: starts the agents, as 'srun -N2 {agent}'", str
    )
    addresses: tuple[str, ...] = declare(
        (), "addresses of this host at which the others reach it: a,b", _read_names
    )
    python: str | None = declare(None, "the Python of the other hosts", str)
    folder: str | None = declare(None, "a folder that all hosts share", str)

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "threads"):
            self._check(name, lambda v: _is_int(v) and v >= 1, "a whole number of at least 1")
        for name in ("timeout", "start_timeout"):
            self._check(name, lambda v: _is_number(v) and v > 0, "a number of seconds above 0")
        self._check("seed", lambda v: _is_int(v) and v >= 0, "a whole number of at least 0")
        self._check("backend", lambda v: isinstance(v, str) and v.strip() != "", "a name")
        self._check(
            "hang_grace", lambda v: _is_number(v) and v >= 0, "a number of seconds, or 0 for never"
        )
        self._check("check", lambda v: v in CHECKS, f"one of {', '.join(CHECKS)}")
        self._check("groups", lambda v: v in GROUPS, f"one of {', '.join(GROUPS)}")
        self._check("device_ipc", lambda v: v in DEVICE_IPC, f"one of {', '.join(DEVICE_IPC)}")
        if self.groups == "torch" and self.check == "strict":
            raise OptionsError(
                "check='strict' needs groups='session': torch's own groups do not tell all that "
                "has to be compared."
            )
        self._check("ipyparallel", lambda v: v in IPYPARALLEL, f"one of {', '.join(IPYPARALLEL)}")
        self._check("launcher", lambda v: v in LAUNCHERS, f"one of {', '.join(LAUNCHERS)}")
        for name in ("seed_per_rank", "text_bars"):
            self._check(name, lambda v: isinstance(v, bool), "True or False")
        self._read("keep", read_duration)
        self._read("keep_idle", read_duration)
        self._read("keep_output", read_size)
        for name in ("keep", "keep_idle"):
            self._check(
                name, lambda v: _is_number(v) and v >= 0, f"{DURATIONS}, a number of seconds, or 0"
            )
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.keep_idle and not self.keep:
            raise OptionsError(
                f"keep_idle={duration_text(self.keep_idle)} is for a session that is kept: give "
                "keep, too, such as keep='12h', or leave it out."
            )
        self._check(
            "keep_output", lambda v: _is_int(v) and v >= LEAST_OUTPUT_BYTES, f"{SIZES}, at least 1M"
        )
        self._check("name", _is_name, NAMES)
        self._tuple("devices", lambda v: (_is_int(v) and v >= 0) or is_uuid(v), DEVICES)
        self._tuple("preload", lambda v: isinstance(v, str), "a list of module names")
        self._tuple("hosts", lambda v: isinstance(v, str) and v.strip() != "", "a list of hosts")
        self._tuple("ranks_per_host", lambda v: _is_int(v) and v >= 1, COUNTS)
        self._tuple("addresses", lambda v: isinstance(v, str) and v.strip() != "", "addresses")
        self._check("launcher_options", _are_launcher_options, LAUNCHER_OPTIONS)
        if self.launcher_options is not None:
            object.__setattr__(self, "launcher_options", dict(self.launcher_options))
        for name in ("command", "python", "folder"):
            self._check(name, lambda v: isinstance(v, str) and v.strip() != "", "a text")
        self._check_nodes()
        if self.devices is not None:
            self._check_devices(self.devices)
        if self.launcher == "inline" and self.nodes > 1:
            raise OptionsError(
                f"launcher='inline' runs one rank in this process, nodes={self.nodes} asks for "
                "more: use launcher='local'."
            )
        if self.launcher == "inline" and self.ranks not in (None, 1):
            raise OptionsError(
                f"launcher='inline' runs one rank in this process, ranks={self.ranks} asks for "
                "more: use launcher='local'."
            )
        if self.launcher == "inline" and self.keep:
            raise OptionsError(
                "launcher='inline' runs the rank in this process and ends with it, so nothing is "
                f"there to be kept (keep={duration_text(self.keep)}): use launcher='local', or "
                "keep=0."
            )
        if self.keep and not os.path.isdir("/proc/self/fd"):
            raise OptionsError(
                f"keep={duration_text(self.keep)} works on Linux alone: another kernel finds the "
                "memory that the ranks share by /proc, which this system has not. Use keep=0."
            )

    # --- several hosts ----------------------------------------------------------------------------

    @property
    def host_plan(self) -> HostPlan | None:
        """Which hosts, and how an agent is started on each; None if all is on this machine."""
        if self.launcher not in HOST_LAUNCHERS:
            return None
        texts = {name: getattr(self, name) for name in ("command", "python", "folder")}
        nodes = self.nodes
        if nodes is None:  # it is being made
            nodes = 0 if self.launcher == "ssh" else len(self.ranks_per_host or ())
        return HostPlan(
            launcher=self.launcher,
            hosts=self.hosts,
            nodes=nodes,
            options=self.launcher_options or {},
            addresses=self.addresses,
            timeout=self.start_timeout,
            **{name: text for name, text in texts.items() if text is not None},
        )

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The number of ranks of each node, as far as the options alone say it."""
        if self.ranks_per_host is not None or self.ranks is None:
            return self.ranks_per_host
        return (self.ranks // self.nodes,) * self.nodes

    def _check_nodes(self) -> None:
        """Set ``nodes`` where it was left out, and see that all that is said of hosts agrees."""
        counts = self.ranks_per_host
        if counts is not None and not counts:
            self._refuse("ranks_per_host", COUNTS)
        if (plan := self.host_plan) is not None:
            object.__setattr__(self, "nodes", plan.count)
        else:
            self._check_one_machine()
            if self.nodes is None:
                object.__setattr__(self, "nodes", len(counts or (1,)))
        if counts is None:
            if self.ranks is not None and self.ranks % self.nodes:
                raise OptionsError(uneven_text(self.ranks, self.nodes))
            return
        if len(counts) != self.nodes:
            raise OptionsError(
                f"ranks_per_host={list(counts)} is for {_many(len(counts), 'host')}, but there "
                f"{'is' if self.nodes == 1 else 'are'} {self.nodes}: give one number for each."
            )
        if self.ranks not in (None, sum(counts)):
            raise OptionsError(
                f"ranks={self.ranks}, but ranks_per_host={list(counts)} makes {sum(counts)}: leave "
                "out one of the two."
            )

    def _check_one_machine(self) -> None:
        for name in OF_HOSTS:
            if getattr(self, name):
                likely = {"hosts": "ssh", "command": "command"}.get(name)
                remedy = f"launcher={likely!r}" if likely else f"one of {', '.join(HOST_LAUNCHERS)}"
                raise OptionsError(
                    f"{name}={getattr(self, name)!r} is for several hosts, and "
                    f"launcher={self.launcher!r} starts all ranks on this machine: give {remedy}"
                    f"{'' if likely else ' as launcher'}, or leave it out."
                )

    def _check_devices(self, devices: tuple[int | str, ...]) -> None:
        if not devices:
            self._refuse("devices", DEVICES)
        counts, named = self.counts, f"devices names {len(devices)} GPUs {list(devices)}"
        if self.launcher in HOST_LAUNCHERS:
            if counts is not None and set(counts) != {len(devices)}:
                raise OptionsError(
                    f"{named} of each host, but the hosts are to have {_listed(counts)} ranks: "
                    "give one device for each rank of a host, or leave out the number of ranks."
                )
        elif counts is not None and sum(counts) != len(devices):
            raise OptionsError(
                f"ranks={sum(counts)} but {named}: give one device for each rank, or leave out "
                "ranks."
            )

    # --- checks -----------------------------------------------------------------------------------

    def _read(self, name: str, read: Callable[[str], Any]) -> None:
        """Take an option that has a unit as a text, too."""
        value = getattr(self, name)
        if not isinstance(value, str):
            return
        try:
            object.__setattr__(self, name, read(value))
        except ValueError as error:
            raise OptionsError(f"{name}={value!r} is not possible: {error}.") from None

    def _check(self, name: str, allowed: Any, what: str) -> None:
        value = getattr(self, name)
        optional = _field(name).default is None
        if value is None and optional:
            return
        if not allowed(value):
            self._refuse(name, what)

    def _tuple(self, name: str, allowed: Any, what: str) -> None:
        value = getattr(self, name)
        if value is None and _field(name).default is None:
            return
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            self._refuse(name, what)
        object.__setattr__(self, name, tuple(value))
        if not all(allowed(item) for item in getattr(self, name)):
            self._refuse(name, what)

    def _refuse(self, name: str, what: str) -> None:
        raise OptionsError(f"{name}={getattr(self, name)!r} is not possible: it takes {what}.")


def uneven_text(ranks: int, nodes: int) -> str:
    """Why that many ranks do not fit that many nodes."""
    fitting, more = max(nodes, ranks // nodes * nodes), ranks % nodes
    counts = [ranks // nodes + (node < more) for node in range(nodes)]
    said = "" if ranks < nodes else f", or say how many each has: ranks_per_host={counts}"
    return (
        f"ranks={ranks} cannot be shared out over nodes={nodes}: each node has as many ranks as "
        f"the others. Ask for {fitting} or {fitting + nodes} ranks{said}."
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts))


def _are_launcher_options(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name) and isinstance(text, str)
        for name, text in value.items()
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value) <= LONGEST_NAME
        and value.isprintable()
        and not re.search(r"[\s/]|^-", value)
        and not value.isdigit()
    )


def _field(name: str) -> Field[Any]:
    return next(f for f in fields(SessionOptions) if f.name == name)


def resolve_options(
    given: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> SessionOptions:
    """Make options from what the caller gave and ``DISTSESSION_*`` variables.

    Raises:
        OptionsError: An unknown name or an impossible value, wherever it came from.
    """
    environ = os.environ if environ is None else environ
    check_names(SessionOptions, given)
    values = {name: value for name, value in given.items() if value is not None}
    found = read_environment(SessionOptions, PREFIX, environ, given)
    if values.get("launcher", "ssh") not in HOST_LAUNCHERS:  # the environment's is not used
        found = {name: value for name, value in found.items() if name not in OF_HOSTS}
    if not {**found, **values}.get("keep"):
        found.pop("keep_idle", None)
    return SessionOptions(**found, **values)


def check_names(options: type[Any], given: Iterable[str], where: str = "") -> None:
    """Refuse what is no option.

    Args:
        options: The dataclass of the options.
        given: The names.
        where: Where they are from, with a blank before it.

    Raises:
        OptionsError: It says which name it may have been.
    """
    known = [option.name for option in fields(options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(known)}."
            raise OptionsError(f"there is no option {name!r}{where}. {hint}")


def read_environment(
    options: type[Any], prefix: str, environ: Mapping[str, str], given: Container[str]
) -> dict[str, Any]:
    """The options that environment variables set and that are not given.

    Args:
        options: The dataclass of the options.
        prefix: With which the names of the variables begin.
        environ: The environment.
        given: Names that win over it.

    Raises:
        OptionsError: A variable cannot be read.
    """
    values = {}
    for option in fields(options):
        variable = prefix + option.name.upper()
        if variable not in environ or option.name in given:
            continue
        try:
            values[option.name] = option.metadata["read"](environ[variable])
        except ValueError as error:
            why = error if isinstance(error, Unreadable) else f"it takes {option.metadata['help']}"
            raise OptionsError(
                f"the environment variable {variable}={environ[variable]!r} cannot be read: {why}."
            ) from None
    return values


def option_sources(
    given: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Where :func:`resolve_options` has the value of each option from.

    Returns:
        For each option ``"given"``, ``"default"``, or the name of the environment variable.
    """
    environ = os.environ if environ is None else environ
    sources = {}
    for option in fields(SessionOptions):
        variable = PREFIX + option.name.upper()
        if option.name in given:
            sources[option.name] = "default" if given[option.name] is None else "given"
        else:
            sources[option.name] = variable if variable in environ else "default"
    return sources


def add_arguments(parser: argparse.ArgumentParser, *, ranks_flags: Sequence[str] = ()) -> None:
    """Give a parser one flag for each option; ``ranks`` is positional unless it gets flags."""
    parser.usage = f"%(prog)s {'' if ranks_flags else '[RANKS] '}[OPTIONS]"
    for option in fields(SessionOptions):
        help_text, read = option.metadata["help"], option.metadata["read"]
        typed = functools.partial(_read_argument, option)
        if option.name == "ranks" and ranks_flags:
            parser.add_argument(
                *ranks_flags, dest="ranks", type=typed, metavar="RANKS", help=help_text
            )
        elif option.name == "ranks":
            parser.add_argument("ranks", nargs="?", type=typed, help=help_text)
        elif read is read_bool:
            flag = "--" + option.name.replace("_", "-")
            parser.add_argument(flag, action="store_const", const=True, help=help_text)
        else:
            parser.add_argument(
                "--" + option.name.replace("_", "-"),
                type=typed,
                metavar=option.name.upper(),
                choices=option.metadata.get("choices"),
                help=help_text,
            )


def _read_argument(option: Field[Any], text: str) -> Any:
    """The value that a word on a command line has."""
    try:
        return option.metadata["read"](text)
    except Unreadable:
        raise
    except ValueError:
        raise Unreadable(f"{text!r} cannot be read: it takes {_takes(option)}") from None


def _takes(option: Field[Any]) -> str:
    kind = {int: "a whole number", float: "a number"}.get(option.metadata["read"])
    return f"{kind}, the {option.metadata['help']}" if kind else str(option.metadata["help"])


def split_launcher_options(
    parser: argparse.ArgumentParser, words: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Take the options of the launcher out of a command line: flags that the parser does not know.

    Only where the launcher is one for several hosts; a flag then has to be written in full. What a
    flag's value is is told by its look: ``--partition gpu``, ``--partition=gpu``, ``--exclusive``.

    Args:
        parser: With the flags of :func:`add_arguments`, or with a command that has them.
        words: The command line.
        environ: Where the launcher may be named, too. Default: this process's environment.

    Returns:
        What is left for the parser, and the options of the launcher.
    """
    flags = parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
            left, taken = split_launcher_options(action.choices[words[0]], words[1:], environ)
            return [words[0], *left], taken
    chosen = [
        word.partition("=")[2] or after
        for word, after in itertools.pairwise([*words, ""])
        if word.partition("=")[0] == "--launcher"
    ] or [(os.environ if environ is None else environ).get(f"{PREFIX}LAUNCHER", "")]
    if "--launcher" not in flags or chosen[-1] not in HOST_LAUNCHERS:
        return list(words), {}
    is_script = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    left, taken, waiting = [], {}, list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        takes_next = not equals and bool(waiting)
        if word == "--" or (is_script and not word.startswith("-")):  # the rest is the script's
            left += [word, *waiting]
            break
        if name in flags or not re.match("--[A-Za-z]", name):
            left.append(word)
            if takes_next and name in flags and flags[name].nargs != 0:
                left.append(waiting.pop(0))
            continue
        if takes_next and not waiting[0].startswith("-"):
            value = waiting.pop(0)
        taken[name[2:]] = value
    return left, taken
