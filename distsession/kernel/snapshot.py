"""What a session is and what its ranks do, gathered without disturbing them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Protocol

from distsession.display.panel import HISTORY_READINGS, Gauge, RankRow, Snapshot
from distsession.display.render import config_rows, state_text
from distsession.errors import SessionStateError
from distsession.options import SessionOptions, duration_text, read_duration, read_size
from distsession.protocol.agent_messages import RankUsage, UsageReply
from distsession.protocol.diagnosis import device_wait_text
from distsession.protocol.messages import RankReport
from distsession.protocol.rank_state import RankState
from distsession.ranks import RankInfo

__all__ = ["Snapshots"]

COMPUTES_AFTER_S = 1.0
"""Seconds that a rank has to run until it is asked for the line that it is at."""
FIRST_READING_S = 0.1
"""Seconds between two readings where there is no earlier one to compare with."""
PLACE_TIMEOUT_S = 0.5
"""Seconds that such a rank has to answer, until it counts as one that does not."""
USAGE_TIMEOUT_S = 0.3
"""Seconds that the agent has to answer; what it said last is shown then."""
USAGE_LIFETIME_S = 3.0
"""Seconds after which what the agent said last is not shown any more."""
SAME_MOMENT_S = 1.0
"""Two estimates of when a state began that differ by less mean the same moment."""


class Reporting(Protocol):
    """Knows what ranks do."""

    def reports(
        self, ranks: Iterable[int] | None = None, *, ask: bool, timeout: float = PLACE_TIMEOUT_S
    ) -> dict[int, RankReport]: ...


class Gauges(Protocol):
    """Knows what ranks use."""

    def usage(self, timeout: float) -> UsageReply | None: ...


class Observed(Protocol):
    """What is needed of the session that is looked at."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> SessionOptions: ...
    @property
    def option_sources(self) -> dict[str, str]: ...
    @property
    def recovery(self) -> Reporting: ...
    @property
    def launcher(self) -> Gauges: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def infos(self) -> tuple[RankInfo, ...]: ...
    @property
    def world_size(self) -> int: ...
    def status(self) -> str: ...


class Snapshots:
    """Looks at one session, now and then.

    Args:
        session: Which.
    """

    def __init__(self, session: Observed):
        self._session = session
        self._before: dict[int, tuple[int, float, float]] = {}
        self._percent: dict[int, int] = {}
        self._history: dict[int, deque[int]] = {}
        self._began: dict[int, tuple[object, float]] = {}

    def take(self) -> Snapshot:
        """How everything is now."""
        session = self._session
        if not session.is_open:
            raise SessionStateError("this session is closed.")
        if not session.infos:
            raise SessionStateError("the ranks of this session are being started.")
        gauges = self._read()
        if gauges is not None and not self._percent:
            time.sleep(FIRST_READING_S)
            gauges = self._read()
        oldest = time.monotonic() - USAGE_LIFETIME_S
        known = () if gauges is None else gauges.uses
        uses = {use.rank: use for use in known if use.at > oldest}
        infos, reports = session.infos, self._reports()
        return Snapshot(
            status=session.status(),
            facts=_facts(session),
            options=_options(session),
            rows=tuple(self._row(info, reports[info.rank], uses.get(info.rank)) for info in infos),
        )

    # --- what the ranks do ------------------------------------------------------------------------

    def _reports(self) -> dict[int, RankReport]:
        """As far as the shared memory says; only who computes for long is asked where."""
        recovery = self._session.recovery
        reports = recovery.reports(ask=False)
        wanted = [rank for rank, report in reports.items() if _is_worth_asking(report)]
        return (
            reports if not wanted else recovery.reports(wanted, ask=True, timeout=PLACE_TIMEOUT_S)
        )

    def _row(self, info: RankInfo, report: RankReport, use: RankUsage | None) -> RankRow:
        kind, state, key = _state(report)
        seconds = report.seconds
        if key[0] == "waiting":
            seconds = report.operations[-1].seconds
        shown, history = self._gauges(info, use if kind != "dead" else None)
        return RankRow(
            rank=info.rank,
            host=info.host,
            pid=info.pid,
            device=f"{info.device.device} ({info.device.name})",
            kind=kind,
            state=state,
            since=self._since(info.rank, (info.pid, *key), seconds),
            gauges=shown,
            history=history,
            node_rank=info.node_rank,
            local_rank=info.local_rank,
            threads=info.device.threads,
        )

    def _since(self, rank: int, key: object, seconds: float) -> str:
        """When a state began, the same at each look while it lasts; nothing if nobody saw it."""
        before, known = self._began.get(rank, (None, 0.0))
        began = time.time() - seconds if seconds or before is not None else 0.0
        if before == key and (not seconds or abs(known - began) < SAME_MOMENT_S):
            began = known
        self._began[rank] = (key, began)
        return time.strftime("%H:%M:%S", time.localtime(began)) if began else ""

    # --- what they use ----------------------------------------------------------------------------

    def _read(self) -> UsageReply | None:
        try:
            gauges = self._session.launcher.usage(USAGE_TIMEOUT_S)
        except SessionStateError:  # the agent is gone, as the status says
            return None
        for use in () if gauges is None else gauges.uses:
            pid, at, seconds = self._before.get(use.rank, (0, 0.0, 0.0))
            self._before[use.rank] = (use.pid, use.at, use.cpu_seconds)
            history = self._history.setdefault(use.rank, deque(maxlen=HISTORY_READINGS))
            if pid != use.pid:
                history.clear()
                self._percent.pop(use.rank, None)
            elif use.at > at:
                percent = round(100 * (use.cpu_seconds - seconds) / (use.at - at))
                self._percent[use.rank] = percent
                history.append(percent if use.gpu_memory < 0 else use.gpu_percent)
        return gauges

    def _gauges(
        self, info: RankInfo, use: RankUsage | None
    ) -> tuple[tuple[Gauge, ...], tuple[int, ...]]:
        if use is None or use.pid != info.pid:
            return (), ()
        history = tuple(self._history[info.rank])
        if use.gpu_memory >= 0:
            memory = Gauge(
                "GPU memory",
                f"{_size(use.gpu_memory)} of {_size(use.gpu_total)}",
                use.gpu_memory / max(1, use.gpu_total),
                use.gpu_memory,
            )
            if use.gpu_percent < 0:
                return (memory,), ()
            share = use.gpu_percent / 100
            return (Gauge("GPU", f"{use.gpu_percent} %", share, share), memory), history
        total = info.device.memory_bytes if info.device.device == "cpu" else 0
        resident = Gauge("memory", _size(use.rss), use.rss / total if total else None, use.rss)
        percent = self._percent.get(info.rank)
        if percent is None:
            return (resident,), ()
        threads = max(1, info.device.threads)
        busy = Gauge("CPU", f"{percent} %", percent / 100 / threads, percent)
        return (busy, resident), tuple(round(percent / threads) for percent in history)


def _is_worth_asking(report: RankReport) -> bool:
    blocked = report.operations and report.operations[-1].is_waiting
    return report.state == RankState.RUNNING and report.seconds > COMPUTES_AFTER_S and not blocked


def _state(report: RankReport) -> tuple[str, str, tuple[object, ...]]:
    """Kind and words of a state, and what stays the same while it lasts."""
    state = RankState(report.state)
    if state is RankState.DEAD or state is RankState.IDLE:
        return str(state), state_text(report), (state,)
    if state.is_halted or state is RankState.SILENT:
        return "halted", state.label, (state, report.request)
    if state.is_asking:
        return "waiting", state_text(report), (state, report.place)
    operation = report.operations[-1] if report.operations else None
    if operation is not None and operation.is_waiting:
        place = f" at {operation.place}" if operation.place else ""
        key = ("waiting", operation.group, operation.sequence)
        return "waiting", f"waiting in {operation.name}{place}", key
    if report.is_device_wait:
        text = f"waiting for its device {device_wait_text(report)}"
        return "waiting", text, ("device", report.request)
    return "running", f"running {report.place}".rstrip(), (state, report.request)


# --- configuration --------------------------------------------------------------------------------


def _facts(session: Observed) -> tuple[tuple[str, str], ...]:
    facts = [
        ("session", session.name),
        ("launcher", session.options.launcher),
        *config_rows(session.infos),
    ]
    from importlib import metadata  # here, for it brings the package `email` along

    with contextlib.suppress(metadata.PackageNotFoundError):  # it runs from a checkout
        facts.append(("distsession", metadata.version("distsession")))
    return tuple(facts)


def _options(session: Observed) -> tuple[tuple[str, str, str], ...]:
    first = session.infos[0]
    found = {  # what a start makes of an option that is left open
        "ranks": session.world_size,
        "backend": first.backend,
        "threads": first.device.threads,
    }
    rows = []
    for option in fields(SessionOptions):
        value = getattr(session.options, option.name)
        if value is None:
            value = found.get(option.name)
        if option.metadata["read"] in _SHOWN and value:
            value = _SHOWN[option.metadata["read"]](value)
        rows.append((option.name, _value(value), session.option_sources[option.name]))
    return tuple(rows)


_SHOWN: dict[Any, Any] = {read_duration: duration_text, read_size: lambda value: _size(value)}
"""How options that have a unit are shown."""


def _value(value: Any) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={text}" for name, text in value.items()) or "not set"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(amount: int) -> str:
    if amount < 2**30:
        return f"{amount / 2**20:.0f} MiB"
    return f"{amount / 2**30:.1f} GiB"
