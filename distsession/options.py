"""The options of a session, each declared once.

One field of :class:`SessionOptions` is a keyword of ``Session(...)``, a flag of
``%session start`` and of the command line (``--start-timeout``), and an environment variable
(``DISTSESSION_START_TIMEOUT``). What is given wins over the environment, and that over the default.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from distsession.devices import (
    Device,
    accelerators,
    chosen_gpus,
    first_gpus,
    is_uuid,
    shared_notes,
)
from distsession.errors import DOCTOR_REMEDY, OptionsError
from distsession.ranks import HostInfo

__all__ = [
    "RankPlan",
    "SessionOptions",
    "add_arguments",
    "check_names",
    "declare",
    "duration_text",
    "option_sources",
    "plan_ranks",
    "read_bool",
    "read_duration",
    "read_environment",
    "read_size",
    "resolve_options",
]

PREFIX = "DISTSESSION_"
LAUNCHERS = ("local", "inline")
CHECKS = ("shared", "strict", "detail", "off")
GROUPS = ("session", "torch")
IPYPARALLEL = ("lazy", "eager")
DEVICES = "a list of GPU numbers, UUIDs (GPU-...) and slices (MIG-...)"
LONGEST_NAME = 64
"""Characters of the name of a session."""

LEAST_OUTPUT_BYTES = 1 << 20
"""What is kept of each rank's output at least: an error shows the last lines."""

DURATIONS = "12h, 90m, 2d, 1h30m, 45s or a number of seconds"
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
    return tuple(part if is_uuid(part) else int(part) for part in parts if part)


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


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
    """Seconds, of ``12h``, ``90m``, ``2d``, ``1h30m``, ``45s``, or a plain number of seconds.

    Raises:
        ValueError: It is none of these.
    """
    word = text.strip().lower()
    if word in _ENDLESS:
        raise Unreadable("a lease has an end: give one that is long enough, such as 30d")
    found = _DURATION.fullmatch(word)
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
        ranks: Number of ranks. Default: one per visible GPU, or 2 where there is none.
        nodes: Number of nodes that this machine plays, each with an agent of its own and as many
            ranks as the others. Payloads then travel between them as between hosts.
        backend: Process-group backend, any name that torch knows, also one for each device type
            (``"cpu:gloo,cuda:nccl"``). Default: nccl on GPUs, gloo on CPU.
        devices: The GPUs to use, in the order of the local ranks: numbers, UUIDs (``"GPU-5f2a"``,
            of which the beginning is enough) and slices (``"MIG-..."``). One may be named more than
            once, and then has several ranks. Default: the first.
        timeout: Seconds that a collective may wait. Default: torch's own (30 min, NCCL 10 min).
        seed: Seed of torch, numpy and random on every rank. Default: a fresh one for each rank.
        seed_per_rank: Give rank r the seed ``seed + r`` instead of the same one.
        threads: Threads of each rank for operations on the CPU. Default: the processors, shared
            out evenly.
        preload: Modules to import before the ranks are forked, so that all share them.
        launcher: ``"local"`` starts processes on this machine; ``"inline"`` runs one rank within
            the calling process, for debugging.
        start_timeout: Seconds until a start that does not come about is given up.
        check: How the ranks compare their collectives: ``"shared"`` before each one, in memory
            that they share: with gloo all ranks meet before it begins, with a backend that waits
            on the device (NCCL) nobody waits, and who comes later sees what does not match;
            ``"strict"`` lets all ranks meet there as well, so that no tensor is changed, at the
            cost of a wait before each; ``"detail"`` through the group itself, as torch does with
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (several times slower); ``"off"`` not at all.
        groups: Whose process groups code gets: ``"session"`` for those that outlive a Stop, or
            ``"torch"`` for torch's own: nothing that they do is seen or compared, and groups and
            modules have to be made again after a Stop.
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
    """

    ranks: int | None = declare(None, "number of ranks", int)
    nodes: int = declare(1, "nodes that this machine plays, to try code for several hosts", int)
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
        if self.groups == "torch" and self.check == "strict":
            raise OptionsError(
                "check='strict' needs groups='session': nothing that torch's own groups do is "
                "seen, so nothing of it can be compared."
            )
        self._check("ipyparallel", lambda v: v in IPYPARALLEL, f"one of {', '.join(IPYPARALLEL)}")
        self._check("launcher", lambda v: v in LAUNCHERS, f"one of {', '.join(LAUNCHERS)}")
        for name in ("seed_per_rank", "text_bars"):
            self._check(name, lambda v: isinstance(v, bool), "True or False")
        self._read("keep", read_duration)
        self._read("keep_idle", read_duration)
        self._read("keep_output", read_size)
        for name in ("keep", "keep_idle"):
            self._check(name, lambda v: _is_number(v) and v >= 0, f"{DURATIONS}, or 0")
            object.__setattr__(self, name, float(getattr(self, name)))
        self._check(
            "keep_output", lambda v: _is_int(v) and v >= LEAST_OUTPUT_BYTES, f"{SIZES}, at least 1M"
        )
        self._check("name", _is_name, NAMES)
        self._tuple("devices", lambda v: (_is_int(v) and v >= 0) or is_uuid(v), DEVICES)
        self._tuple("preload", lambda v: isinstance(v, str), "a list of module names")
        if self.devices is not None:
            if not self.devices:
                self._refuse("devices", DEVICES)
            if self.ranks is not None and self.ranks != len(self.devices):
                raise OptionsError(
                    f"ranks={self.ranks} but devices names {len(self.devices)} GPUs "
                    f"{list(self.devices)}: give one device for each rank, or leave out ranks."
                )
        if self.ranks is not None and self.ranks % self.nodes:
            raise OptionsError(_uneven(self.ranks, self.nodes))
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


def _uneven(ranks: int, nodes: int) -> str:
    fitting = max(nodes, ranks // nodes * nodes)
    return (
        f"ranks={ranks} cannot be shared out over nodes={nodes}: each node has as many ranks as "
        f"the others. Ask for {fitting} or {fitting + nodes} ranks."
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
    return SessionOptions(**read_environment(SessionOptions, PREFIX, environ, given), **values)


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
    for option in fields(SessionOptions):
        help_text, read = option.metadata["help"], option.metadata["read"]
        if option.name == "ranks" and ranks_flags:
            parser.add_argument(
                *ranks_flags, dest="ranks", type=read, metavar="RANKS", help=help_text
            )
        elif option.name == "ranks":
            parser.add_argument("ranks", nargs="?", type=read, help=help_text)
        elif read is read_bool:
            flag = "--" + option.name.replace("_", "-")
            parser.add_argument(flag, action="store_const", const=True, help=help_text)
        else:
            parser.add_argument(
                "--" + option.name.replace("_", "-"),
                type=read,
                metavar=option.name.upper(),
                choices=option.metadata.get("choices"),
                help=help_text,
            )


# --- from options and a host to ranks -------------------------------------------------------------


@dataclass(frozen=True)
class RankPlan:
    """How many ranks a host gets, on which devices, with which backend.

    Attributes:
        devices: torch's name of each rank's device.
        nodes: How many nodes it plays; each has a block of as many ranks.
        visible: What each rank has for ``CUDA_VISIBLE_DEVICES``; empty where that is as it is here.
        is_shared: A GPU, or slices of one, have several ranks.
        notes: Sentences for the user.
    """

    world_size: int
    devices: tuple[str, ...]
    backend: str
    threads: int
    nodes: int = 1
    visible: tuple[str, ...] = ()
    is_shared: bool = False
    notes: tuple[str, ...] = ()

    def node_of(self, rank: int) -> int:
        return rank // (self.world_size // self.nodes)

    def ranks_of(self, node: int) -> range:
        count = self.world_size // self.nodes
        return range(node * count, (node + 1) * count)


def plan_ranks(options: SessionOptions, host: HostInfo) -> RankPlan:
    """Fit the options to what a host has.

    A backend that serves CUDA puts one rank on each GPU. ``gloo`` alone means the CPU, also where
    there are GPUs; ``cuda:gloo`` asks for them.

    Raises:
        OptionsError: The host cannot give what the options ask for.
    """
    pairs = _backend_pairs(options.backend, host)
    kind = _accelerator(options, host, pairs)
    backend = ",".join(":".join(filter(None, pair)) for pair in pairs)  # torch takes no spaces
    backend = backend or ("nccl" if kind == "cuda" else "gloo")
    notes: tuple[str, ...] = ()
    if kind == "cuda":
        uses_nccl = not pairs or any(name == "nccl" for _, name in pairs)
        if options.devices:
            placed = chosen_gpus(host, options.devices)
        else:
            placed = first_gpus(host, options.ranks, uses_nccl)
        notes = shared_notes(host, placed, uses_nccl)
    elif kind:
        placed = accelerators(host, kind, options.ranks, options.devices, backend)
    else:
        if options.devices:
            raise OptionsError(
                f"devices={list(options.devices)} names GPUs, but "
                + (
                    f"{host.host} shows none."
                    if not host.gpus
                    else f"backend {backend!r} runs on the CPU: leave one of the two out."
                )
            )
        placed = [Device("cpu")] * (options.ranks or max(2, options.nodes))
    if len(placed) % options.nodes:
        raise OptionsError(_uneven(len(placed), options.nodes))
    threads = options.threads or max(1, host.cpus // len(placed))
    visible = tuple(device.visible for device in placed)
    gpus = [device.gpu for device in placed if device.gpu >= 0]
    return RankPlan(
        len(placed),
        tuple(device.name for device in placed),
        backend,
        threads,
        options.nodes,
        visible if any(visible) else (),
        len(set(gpus)) < len(gpus),
        notes,
    )


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
