"""Commands on the sessions that are kept: ``distsession ls``, ``stop``, ``logs``, ``diagnose``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distsession.cluster.end_kept import end_session
from distsession.cluster.kept import (
    damaged_sessions,
    ended_sessions,
    find_kept,
    kept_sessions,
    time_text,
)
from distsession.cluster.session_processes import look_at_processes
from distsession.display.render import diagnosis_text, state_and_since
from distsession.engine.usage import GpuReader
from distsession.errors import KeptSessionError
from distsession.kernel.kept_state import KeptState, kept_reports, look_at, rank_pids
from distsession.kernel.kept_table import doing_text, kept_text
from distsession.protocol.diagnosis import Verdict, diagnose
from distsession.protocol.messages import RankReport

__all__ = ["diagnose_session", "list_sessions", "stop_session"]


def list_sessions(*, as_json: bool) -> int:
    """``distsession ls``: who has which session, what it does, and what it uses."""
    sessions, damages, ended = kept_sessions(), damaged_sessions(), ended_sessions()
    gpus = GpuReader() if sessions else None
    states = [look_at(kept, gpus) for kept in sessions]
    if as_json:
        found = [_state_facts(state) for state in states]
        problems, over = list(map(str, damages)), list(map(asdict, ended))
        print(json.dumps({"sessions": found, "problems": problems, "ended": over}, indent=2))
    else:
        print(kept_text(states, ended))
        for damage in damages:
            print(f"distsession: {damage}", file=sys.stderr)
    return 1 if damages else 0


def _state_facts(state: KeptState) -> dict[str, Any]:
    kept = state.kept
    return {
        **asdict(kept),
        "has_owner": kept.has_owner,
        "lease_left_s": kept.lease_left_s,
        "doing": doing_text(state),
        "problem": state.problem,
        "memory_bytes": state.memory_bytes,
        "gpu_memory_bytes": state.gpu_memory_bytes,
        "gone_agents": list(kept.gone_agents.values()),
        "stopped_agents": list(state.stopped_agents.values()),
        "rank_states": _rank_facts(state.reports, state.pids),
    }


def _rank_facts(reports: Mapping[int, RankReport], pids: Mapping[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "pid": pids.get(rank),
            "state": str(report.state),
            "seconds": round(report.seconds, 3),
            "doing": state_and_since(report)[0],
            "place": report.place,
            "request": report.request,
        }
        for rank, report in sorted(reports.items())
    ]


def stop_session(name: str) -> int:
    """``distsession stop``: end a session with its ranks, and wait until it has ended."""
    kept = find_kept(name, any_version=True)
    when = time_text(kept.started)
    keepers = end_session(kept, f"`distsession stop` has ended it (by pid {os.getpid()})")
    print(f"{kept}, started {when}, has ended.")
    if keepers:
        pids = ", ".join(map(str, keepers))
        print(f"Its folder {kept.folder} stays until its kernel (pid {pids}) lets it go.")
    return 0


def diagnose_session(name: str | None, *, as_json: bool) -> int:
    """``distsession diagnose``: what each rank does, and who waits for whom."""
    kept = find_kept(name)
    processes = look_at_processes(kept.folder, kept.agents)
    try:
        reports = kept_reports(kept, processes)
    except (OSError, ValueError) as error:
        raise KeptSessionError(
            f"what the ranks of {kept} do is not known, since the memory that says so cannot be "
            f"read: {error}. `distsession stop {kept.name}` ends it."
        ) from None
    verdict = diagnose(reports)
    if as_json:
        facts = _verdict_facts(verdict)
        ranks = _rank_facts(reports, rank_pids(kept, processes))
        print(json.dumps({"name": kept.name, **facts, "ranks": ranks}, indent=2))
    else:
        print(diagnosis_text(reports, verdict.sentence))
    return 0


def _verdict_facts(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind.name.lower(),
        "verdict": verdict.sentence,
        "waiting": list(verdict.waiting),
        "missing": list(verdict.missing),
    }
