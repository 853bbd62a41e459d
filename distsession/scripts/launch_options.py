"""How a script starts its ranks, each option declared once.

One field of :class:`LaunchOptions` is a keyword, a flag (``--first-rank``), an environment variable
(``DISTSESSION_LAUNCH_FIRST_RANK``), and a name in a file of settings.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from distsession.errors import OptionsError
from distsession.options import check_names, declare, read_bool, read_environment

__all__ = ["LaunchOptions"]

PREFIX = "DISTSESSION_LAUNCH_"
PORT_MAX = 65535


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a script starts its ranks.

    ``LaunchOptions(...)`` takes keywords; :meth:`from_arguments`, :meth:`from_environment` and
    :meth:`from_file` read them elsewhere. What is given wins over the environment, that over a
    file, and that over the default.

    Attributes:
        distributed: Start ranks. If not, the function runs in this process, without a group.
        first_rank: The rank of this host's first process; those of its others follow.
        world_size: Number of ranks on all hosts. Default: up to this host's last.
        backend: Process-group backend. Default: nccl on GPUs, gloo on CPU.
        host: Where the hosts meet: name or address of the one that has rank 0.
        port: A port there that is free. Not used where this host has all ranks.
        processes: Number of ranks on this host. Default: all from ``first_rank`` to the last; if
            ``world_size`` is not given either, one per visible GPU, or 2 where there is none.
    """

    distributed: bool = declare(True, "start ranks, rather than run in this process", read_bool)
    first_rank: int = declare(0, "rank of this host's first process", int)
    world_size: int | None = declare(None, "number of ranks on all hosts", int)
    backend: str | None = declare(None, "process-group backend, such as gloo or nccl", str)
    host: str = declare("127.0.0.1", "host that has rank 0, where all meet", str)
    port: int = declare(29500, f"a free port there, from 1 to {PORT_MAX}", int)
    processes: int | None = declare(None, "number of ranks on this host", int)

    def __post_init__(self) -> None:
        self._check("distributed", isinstance(self.distributed, bool), "True or False")
        self._check("first_rank", _is_int(self.first_rank, 0), "a whole number of at least 0")
        for name in ("world_size", "processes"):
            value = getattr(self, name)
            self._check(name, value is None or _is_int(value, 1), "a whole number of at least 1")
        for name in ("backend", "host"):
            value = getattr(self, name)
            right = isinstance(value, str) and value.strip() != ""
            self._check(name, right or (value is None and name == "backend"), "a name")
        in_range = _is_int(self.port, 1) and self.port <= PORT_MAX
        self._check("port", in_range, f"a whole number from 1 to {PORT_MAX}")
        if self.world_size is None:
            if self.processes is not None:
                object.__setattr__(self, "world_size", self.first_rank + self.processes)
            elif self.first_rank:
                raise OptionsError(
                    f"first_rank={self.first_rank} says that other hosts have ranks before: give "
                    "world_size, too."
                )
            return
        left = self.world_size - self.first_rank
        if left < 1:
            raise OptionsError(
                f"first_rank={self.first_rank} is not possible: with "
                f"world_size={self.world_size} it goes from 0 to {self.world_size - 1}."
            )
        if self.processes is None:
            object.__setattr__(self, "processes", left)
        elif self.processes > left:
            raise OptionsError(
                f"processes={self.processes} is not possible: from first_rank={self.first_rank} "
                f"to world_size={self.world_size} there are {left}."
            )

    def _check(self, name: str, is_right: bool, allowed: str) -> None:
        if not is_right:
            raise OptionsError(
                f"{name}={getattr(self, name)!r} is not possible: it takes {allowed}."
            )

    @property
    def url(self) -> str:
        """Where the ranks meet, as ``init_process_group`` takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def rank_of(self, process: int) -> int:
        """The rank of one of this host's processes, which count from 0.

        Raises:
            OptionsError: There is no such process.
        """
        if not _is_int(process, 0) or (self.processes is not None and process >= self.processes):
            last = "" if self.processes is None else f" to {self.processes - 1}"
            raise OptionsError(f"there is no process {process!r} here: they go from 0{last}.")
        return self.first_rank + process

    # --- where they come from ---------------------------------------------------------------------

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, /, **given: Any
    ) -> LaunchOptions:
        """From ``DISTSESSION_LAUNCH_*`` variables, such as ``DISTSESSION_LAUNCH_FIRST_RANK``.

        Args:
            environ: Instead of ``os.environ``.
            **given: Options that win over the environment.

        Raises:
            OptionsError: An unknown name or an impossible value, wherever it came from.
        """
        return cls._merge(given, os.environ if environ is None else environ, {}, "")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], /, **given: Any) -> LaunchOptions:
        """From a file of JSON or TOML, which its ending tells.

        The environment wins over the file, so that hosts may share one.

        Raises:
            OptionsError: The file cannot be read; an unknown name or an impossible value.
        """
        return cls._merge(given, os.environ, _read_file(Path(path)), f" in {path}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser one flag for each option, and ``--no-distributed``."""
        for option in fields(cls):
            flag = "--" + option.name.replace("_", "-")
            more: dict[str, Any] = {"type": option.metadata["read"], "metavar": option.name.upper()}
            if option.type == "bool":
                more = {"action": argparse.BooleanOptionalAction}
            parser.add_argument(flag, default=None, help=option.metadata["help"], **more)

    @classmethod
    def from_arguments(
        cls, arguments: Sequence[str] | argparse.Namespace | None = None
    ) -> LaunchOptions:
        """From a command line, and from the environment where it says nothing.

        Args:
            arguments: Those of a parser that :meth:`add_arguments` was called with, or the words
                of the command line. Default: ``sys.argv``.

        Raises:
            OptionsError: An impossible value.
        """
        if not isinstance(arguments, argparse.Namespace):
            parser = argparse.ArgumentParser()
            cls.add_arguments(parser)
            arguments = parser.parse_args(arguments)
        values = vars(arguments)
        given = {f.name: values[f.name] for f in fields(cls) if values.get(f.name) is not None}
        return cls.from_environment(**given)

    @classmethod
    def _merge(
        cls,
        given: Mapping[str, Any],
        environ: Mapping[str, str],
        file: Mapping[str, Any],
        where: str,
    ) -> LaunchOptions:
        check_names(cls, given)
        check_names(cls, file, where)
        values = {**file, **read_environment(cls, PREFIX, environ, given)}
        return cls(**{**values, **given})


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _read_file(path: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix.lower() not in readers:
        raise OptionsError(f"{path} is neither a .json nor a .toml file.")
    try:
        values = readers[path.suffix.lower()](path.read_text("utf-8"))
    except OSError as error:
        raise OptionsError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # of the parsers, and of text that is not UTF-8
        raise OptionsError(f"{path} cannot be read: {error}.") from None
    if not isinstance(values, dict):
        raise OptionsError(f"{path} holds no names with values.")
    return values
