"""Finding the sessions of this user that outlive their kernels.

Each has a private folder, see :mod:`distsession.cluster.folder`. Those of other users are not
looked at.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import distsession
from distsession.cluster.kept_session import (
    KeptSession,
    end_text,
    lost_text,
    read_kept,
    time_text,
    write_kept,
)
from distsession.errors import KeptSessionError, in_lines
from distsession.protocol import folder_lock, places
from distsession.protocol.kept_record import (
    FOUND_GONE,
    WAS_ENDED,
    EndedSession,
    note_end,
    read_ends,
)

__all__ = [
    "KeptSession",
    "damaged_sessions",
    "end_text",
    "ended_sessions",
    "find_kept",
    "kept_sessions",
    "read_kept",
    "time_text",
    "write_kept",
]


ENDS_LISTED_S = 24 * 3600.0
"""Seconds for which a session that has ended is listed."""


def kept_sessions() -> list[KeptSession]:
    """The sessions of this user that are kept and live, the newest first.

    What is left of those whose processes are gone is removed.
    """
    return _look().alive


def damaged_sessions() -> list[KeptSessionError]:
    """What is to be said of sessions whose files cannot be read."""
    return _look().damaged


def ended_sessions() -> list[EndedSession]:
    """The sessions of this user that have ended by themselves since a day ago, the last first."""
    since = time.time() - ENDS_LISTED_S
    return [end for end in _look().ended if end.at >= since and end.how != WAS_ENDED]


def find_kept(name: str | None = None, *, any_version: bool = False) -> KeptSession:
    """The session that somebody means.

    Args:
        name: Of the session, or of its folder, or its path, or the pid of its agent. Default: the
            only one there is.
        any_version: Also one that another version of the package has started.

    Raises:
        KeptSessionError: There is none, or more than one, or it is gone, or of another version, or
            its files are damaged.
    """
    found = _look()
    name = name.strip() if name is not None else None
    kept = _only(found.alive) if not name and found.alive else _named(found, name or "")
    if not kept.is_of_this_version and not any_version:
        raise KeptSessionError(
            f"{kept} is of distsession {kept.version}, and this is {distsession.__version__}: "
            f"attach to it with that version, or end it with `distsession stop {kept.name}`."
        )
    return kept


@dataclass(frozen=True)
class _Found:
    """What a look at all folders has found.

    Attributes:
        alive: The sessions whose agents live.
        gone: Those whose agents have ended.
        damages: The errors of sessions that cannot be read, by their folders.
        ended: The records of sessions that have ended and left no folder, the last first.
    """

    alive: list[KeptSession]
    gone: list[KeptSession]
    damages: dict[str, KeptSessionError]
    ended: list[EndedSession]

    @property
    def damaged(self) -> list[KeptSessionError]:
        return list(self.damages.values())


def _look() -> _Found:
    sessions, damages = [], {}
    bases = _bases()
    for folder in _folders(bases):
        try:
            sessions.append(read_kept(folder))
        except FileNotFoundError:  # not kept, or just ended
            continue
        except KeptSessionError as error:
            damages[folder] = error
    sessions.sort(key=lambda kept: kept.started, reverse=True)
    alive = [kept for kept in sessions if kept.is_alive]
    gone = [kept for kept in sessions if kept not in alive]
    for kept in gone:
        note_end(kept.folder, FOUND_GONE, _ended_text(kept))
    ended = []
    for base in bases:
        folder_lock.sweep(base)
        ended += read_ends(base, folder_lock.PREFIX)
    ended.sort(key=lambda end: end.at, reverse=True)
    damages = {folder: error for folder, error in damages.items() if os.path.lexists(folder)}
    return _Found(alive, gone, damages, ended)


def _bases() -> list[str]:
    """Where folders of sessions are made."""
    return [place for place in places.places() if not places.problem(place)]


def _folders(bases: Iterable[str]) -> Iterator[str]:
    for base in bases:
        with contextlib.suppress(OSError):
            for entry in os.scandir(base):
                if entry.name.startswith(folder_lock.PREFIX) and _is_own(entry.path):
                    yield entry.path


def _is_own(folder: str) -> bool:
    """Whether it is a folder that this user has and nobody else can write to."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    is_private = not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and is_private


# --- naming ---------------------------------------------------------------------------------------


def _only(sessions: list[KeptSession]) -> KeptSession:
    if len(sessions) == 1:
        return sessions[0]
    raise in_lines(
        KeptSessionError,
        f"there are {len(sessions)} sessions, so say which:\n{_listing(sessions)}",
    )


def _named(found: _Found, name: str) -> KeptSession:
    """The one that is meant by a name.

    Raises:
        KeptSessionError: There is none, or more than one.
    """
    matching = [kept for kept in found.alive if _is_meant(kept, name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise in_lines(
            KeptSessionError,
            f"there are {len(matching)} sessions named {name}, so say which by its pid or its "
            f"folder:\n{_listing(matching)}",
        )
    for folder, damage in found.damages.items():
        if name in (os.path.basename(folder), folder):
            raise damage
    for kept in found.gone:
        if _is_meant(kept, name):
            raise KeptSessionError(
                f"{kept} is gone: {_ended_text(kept)}. Its variables are lost; what is left of it "
                "is removed."
            )
    for end in found.ended:
        if name and name in (end.name, end.folder, os.path.basename(end.folder)):
            raise KeptSessionError(lost_text(end))
    if os.sep in name:
        return _at(name)
    raise KeptSessionError(_not_there_text(found, name))


def _is_meant(kept: KeptSession, name: str) -> bool:
    if os.sep in name:
        return os.path.realpath(name) == os.path.realpath(kept.folder)
    pids = map(str, kept.agents)
    return name == kept.name or name == os.path.basename(kept.folder) or name in pids


def _at(path: str) -> KeptSession:
    """The session whose folder is named, in a place where no others are looked for."""
    folder = os.path.realpath(path)
    if not os.path.lexists(folder):
        raise KeptSessionError(f"there is no folder {path}: its session is gone.")
    if not _is_own(folder) or places.problem(os.path.dirname(folder)):
        raise KeptSessionError(
            f"{path} is no folder that is yours alone: nobody can attach to another user's session."
        )
    try:
        kept = read_kept(folder)
    except FileNotFoundError:
        raise KeptSessionError(f"{path} is not the folder of a session that is kept.") from None
    if not kept.is_alive:
        raise KeptSessionError(f"{kept} is gone: {_ended_text(kept)}.")
    return kept


def _ended_text(kept: KeptSession) -> str:
    left = kept.lease_left_s
    if left == 0:
        assert kept.owner is not None
        return f"its lease ended at {time_text(kept.owner.lease_ends_at or 0.0)}"
    pids = ", ".join(map(str, kept.agents))
    of = "its agent" if len(kept.agents) == 1 else "its agents"
    return f"{of} (pid {pids}) {'has' if len(kept.agents) == 1 else 'have'} ended"


def _not_there_text(found: _Found, name: str) -> str:
    known = [kept.name for kept in found.alive]
    damaged = "".join(f" {error}" for error in found.damaged)
    if not known:
        of_name = f" named {name}" if name else ""
        last = f" The last one: {end_text(found.ended[0])}" if found.ended and not name else ""
        return (
            f"there is no session{of_name} that is kept: `%session start 4 --keep 12h` or "
            f'Session(4, keep="12h") starts one that outlives its kernel.{last}{damaged}'
        )
    close = difflib.get_close_matches(name, known, n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    return f"there is no session {name}.{meant} There are: {', '.join(known)}.{damaged}"


def _listing(sessions: Iterable[KeptSession]) -> str:
    return "\n".join(
        f"{kept}, started {time_text(kept.started)}: pid {kept.agents[0]}, {kept.folder}"
        for kept in sessions
    )
