"""Where the process groups meet that user code makes by itself.

A rank is in the session's process group from the start. Code that was written for torchrun makes
one all the same: ``init_process_group`` in a group goes on with it, where nothing contradicts that.
A call that brings its own place to meet and says something else makes another group in its place.
After ``destroy_process_group()``, and for ``rpc.init_rpc``, ranks meet again. torch has rank 0 open
a port for that, and the others wait for it in C++, for half an hour, where nobody can stop them;
a port that was used before may be in use still. So here they meet in the session's own store,
whatever ``MASTER_PORT`` says: that wait is seen, named and ended as any other.
"""

from __future__ import annotations

import functools
import inspect
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distsession.engine import process_group, store
from distsession.engine.collectives import torch_private
from distsession.engine.collectives.group import Groups
from distsession.engine.collectives.recorder import Recorder
from distsession.engine.failure import is_user_code
from distsession.engine.listeners import RequestListener
from distsession.engine.process_group import Place
from distsession.engine.torch_errors import TWICE, clients_text, in_torchs_place, late_clients_text
from distsession.errors import CollectiveError
from distsession.protocol.messages import Request

__all__ = ["WITHOUT_GROUP", "UserGroups"]

NAME_TIMEOUT_S = 10.0
"""How long the name of a host may need to become known."""
NAME_PAUSE_S = 0.2

WITHOUT_GROUP = (
    "This rank has left its process group (destroy_process_group): init_process_group() makes one "
    "of all ranks that call it, and the next run has the session's again."
)


class UserGroups(RequestListener):
    """Process groups that user code makes and destroys on this rank.

    Args:
        place: Of this rank.
        recorder: Lets the kernel see whether there is a process group.
        groups: All of this process; None where torch makes its own.
    """

    def __init__(self, place: Place, recorder: Recorder, groups: Groups | None):
        self._place = place
        self._groups = groups
        self._recorder = recorder
        self._region = recorder.region
        self.is_given_back = False
        """Code has destroyed the session's group on all ranks, which have it again for what comes
        next."""
        self._forked_from = ""
        """Why this process has no group, if it is a copy of the rank."""
        self._generation = 0
        self._met: Counter[str] = Counter()

    def install(self) -> None:
        """From here on torch asks this object."""
        torch_private.install_rendezvous(self._meet)
        torch_private.replace_init_process_group(self._wrap)

    def begin_generation(self, generation: int) -> None:
        """All ranks connect their group anew, so all count from the beginning."""
        self._generation = generation
        self._met.clear()

    def end_request(self, request: Request) -> None:
        is_in_one = dist.is_initialized()
        has_own = is_in_one and not process_group.is_of_session(self._place, self._groups)
        self._region.set_without_group(not is_in_one, has_own=has_own)

    def become_child(self, text: str) -> None:
        """In a process that was forked from the rank, whose connections are the rank's.

        What it makes of groups is torch's own affair, as in a child of a plain program.

        Args:
            text: What to say where it wants to use the rank's.
        """
        self._forked_from = text
        if self._groups is not None:
            self._groups.become_child()
        torch_private.leave_groups_to_torch()
        torch_private.refuse_groups(CollectiveError(text))

    def _meet(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        uses_libuv: bool,
    ) -> Any:
        """A store for these ranks alone; returns when all of them have come.

        Returns:
            The store; None where processes outside of the session have to come, too.
        """
        place = self._place
        if not 0 < world_size <= place.world_size or not 0 <= rank < world_size:
            if port == place.store_port:
                # Nobody else can come there, and torch would wait for half an hour.
                raise ValueError(
                    f"rank {rank} of world_size={world_size} cannot meet at the session's port: "
                    f"the session has {place.world_size} ranks. To meet with other processes, give "
                    "init_process_group an init_method= or store= of your own."
                )
            return None
        _await_host(host, port, timeout)
        # The session's own port is another one on each host.
        where = "the session's port" if port == place.store_port else f"port {port}"
        name = f"rendezvous of {world_size} ranks at {where}"
        part = f"generation{self._generation}/{name}"
        client = store.session_store(place.store_path)
        this = f"{part}/{self._met[name]}"
        try:
            client.meet(this, part, world_size, timeout)
        except dist.DistStoreError as error:
            seconds, came = timeout.total_seconds(), 1 + client.add(f"{this}/arrived", 0)
            text = clients_text(seconds, came, world_size)
            kind: type[Exception] = dist.DistStoreError
            if rank != 0:
                text, kind = late_clients_text(host, port, seconds), dist.DistNetworkError
            if isinstance(error, CollectiveError):
                in_torchs_place(error, text, kind)
                raise
            raise kind(
                f"{came} of {world_size} ranks came to the {name} within {seconds:g} s: each has "
                f"to call init_process_group or init_rpc there. (torch: {text})"
            ) from None
        self._met[name] += 1
        own, met = f"{this}/store", _Met(host, port, uses_libuv)
        if place.backend != "gloo":  # whose threads call a store without Python
            return _NativeUserStore(own, store.connect_tcp(place.store_port), met)
        return _UserStore(own, client, met)

    def _wrap(self, native: Any) -> Any:
        signature = inspect.signature(native)

        @functools.wraps(native)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if dist.is_initialized() and self.is_given_back:
                process_group.leave()  # as the user's code has done before
            self.is_given_back = False
            if not dist.is_initialized():
                # It goes into the keys at which gloo meets, and counts attempts that failed, too.
                torch_private.begin_group_count()
                native(*args, **kwargs)
                return
            if self._forked_from and self._has_world_of_rank():
                raise CollectiveError(self._forked_from)
            asked = signature.bind(*args, **kwargs).arguments
            problem = _contradiction(asked)
            if problem and self._asks_for_another(asked):
                warnings.warn(
                    f"this rank was in a process group, {problem}, and leaves it for its own: "
                    "after destroy_process_group() the next run has the session's again.",
                    stacklevel=2,
                )
                process_group.leave()
                native(*args, **kwargs)
                return
            if problem:
                raise ValueError(
                    f"this rank is in a process group already, {problem}. Leave the call out, or "
                    "call torch.distributed.destroy_process_group() on all ranks before it. "
                    f"(torch: {TWICE})"
                )
            warnings.warn(
                "this rank is in a process group already, and init_process_group goes on with it: "
                "the call can be left out. To make another, call destroy_process_group() before.",
                stacklevel=2,
            )

        return init_process_group

    def _asks_for_another(self, asked: dict[str, Any]) -> bool:
        """Whether a call cannot mean the session's group: it brings its own place to meet."""
        if asked.get("store") is not None:
            return True
        url, size = str(asked.get("init_method") or "env:"), asked.get("world_size")
        is_small = isinstance(size, int) and 0 < size <= self._place.world_size
        return is_small and not url.startswith("env:") and not _contradiction(asked, ("backend",))

    def _has_world_of_rank(self) -> bool:
        return self._groups is not None and self._groups.has_world


def _await_host(host: str, port: int, timeout: timedelta) -> None:
    """Wait until a host's name is known, as torch does, which connects to it; but not for minutes.

    Raises:
        DistNetworkError: It is not.
    """
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            reason = error
        if time.monotonic() - began > min(timeout.total_seconds(), NAME_TIMEOUT_S):
            text = late_clients_text(host, port, timeout.total_seconds())
            raise dist.DistNetworkError(
                f"no host is known by the name {host!r} ({reason}): ranks of a session meet as "
                f"well if init_process_group() is given no address. (torch: {text})"
            )
        time.sleep(NAME_PAUSE_S)


@dataclass(frozen=True)
class _Met:
    """Where ranks have met, as a ``TCPStore`` says it."""

    host: str
    port: int
    uses_libuv: bool


class _LikeTcpStore:
    """What code asks of a ``TCPStore``, in the place of which it gets another store."""

    _met: _Met

    @property
    def host(self) -> str:
        return self._met.host

    @property
    def port(self) -> int:
        return self._met.port

    @property
    def libuvBackend(self) -> bool:
        return self._met.uses_libuv


class _NativeUserStore(_LikeTcpStore, dist.PrefixStore):
    """A part of a store without Python, for a group of the user's."""

    def __init__(self, prefix: str, inner: dist.Store, met: _Met):
        super().__init__(prefix, inner)
        self._met = met


class _UserStore(_LikeTcpStore, store.StorePart):
    """A part of the session's store, for a group of the user's.

    torch sets the group's time limit on the store that it has met at. The session's has its own,
    by which a wait that nobody has limited is known. What user code sets holds for this part alone.
    """

    def __init__(self, prefix: str, inner: store.Store, met: _Met):
        super().__init__(prefix, inner)
        self._met = met
        self._limit: timedelta | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = super().timeout if self._limit is None else self._limit  # type: ignore[misc]
        return limit

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._limit if timeout is None else timeout
        if limit is None:
            super().wait([*keys])
        else:
            super().wait([*keys], limit)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if self._limit is not None:
            self.wait(keys)
        return super().multi_get([*keys])


def _contradiction(
    asked: dict[str, Any], names: Sequence[str] = ("backend", "rank", "world_size")
) -> str:
    """What of a call of ``init_process_group`` does not agree with the group that there is.

    Args:
        asked: The arguments of the call.
        names: Those that are looked at.
    """
    backend = asked.get("backend") if "backend" in names else None
    present = dist.get_backend_config() or dist.get_backend()
    if backend and not set(_backends(str(backend))) <= set(_backends(present)):
        return f"whose backend is {dist.get_backend()}, not {backend}"
    for name, mine in (("rank", dist.get_rank()), ("world_size", dist.get_world_size())):
        value = asked.get(name, -1) if name in names else -1
        if value not in (-1, None, mine):
            return f"with {name}={mine}, not {value}"
    return ""


def _backends(text: str) -> list[str]:
    return [part.rpartition(":")[2] for part in text.lower().split(",")]
