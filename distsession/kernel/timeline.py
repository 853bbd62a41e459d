"""The timeline of a session's last cell, from the records of its ranks."""

from __future__ import annotations

from distsession.errors import SessionStateError
from distsession.kernel.requests import Requests
from distsession.protocol.messages import TimelineRequest
from distsession.ranks import host_names
from distsession.timeline.timeline import Timeline
from distsession.timeline.waits import merge

__all__ = ["bring"]


def bring(requests: Requests, *, waits: bool = True) -> Timeline:
    """Ask the ranks for their records and put them together.

    Args:
        requests: Of the session; its last run.
        waits: Wait for ranks that are busy; otherwise they are left out.

    Raises:
        SessionStateError: There is no record.
    """
    run = requests.last_run
    if run is None:
        raise SessionStateError(
            "there is no timeline yet: it shows the last cell, or the last function of run()."
        )
    dead = requests.launcher.dead_ranks()
    asked = [
        rank
        for rank in run.ranks
        if rank not in dead and (waits or not requests.channel.is_busy(rank))
    ]
    number = run.number
    found = requests.call(asked, lambda n: TimelineRequest(n, number), []) if asked else {}
    traces = {rank: trace for rank, trace in found.items() if trace is not None}
    if not traces:
        raise SessionStateError(
            "the record of the last cell is gone with the processes of its ranks: run it again."
        )
    infos = {info.rank: info for info in requests.launcher.infos}
    hosts = host_names(infos.values())
    on = {rank: f"{host}, " for rank, host in hosts.items()}
    names = {r: f"rank {r} ({on.get(r, '')}{infos[r].device.device})" for r in traces}
    absent = [rank for rank in run.ranks if rank not in traces]
    return Timeline(
        merge(traces.values(), absent=absent),
        names=names,
        hosts=hosts,
        backend=requests.launcher.infos[0].backend,
    )
