"""What Slurm says of a job."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass

__all__ = ["JobState", "SlurmJob", "read_time"]

ASK_S = 1.0
"""Seconds for which an answer counts. Every question goes to the one controller of a cluster."""
OWN_END_S = 3.0
"""Seconds that a job has to end by itself, once its agents have been told to."""
END_S = 30.0
"""Seconds that a job has to be gone from the queue."""

PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SUSPENDED")
NEVER = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints")
"""Reasons for which a job waits until the cluster is configured in another way."""
LIVE = (*PENDING, "RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


@dataclass(frozen=True)
class JobState:
    """Of a job.

    Attributes:
        state: Slurm's own word for it, such as ``"PENDING"``.
        reason: Why it is so, such as ``"Priority"``; empty without one.
        problem: Why Slurm does not say.
    """

    state: str
    reason: str = ""
    problem: str = ""

    @property
    def is_pending(self) -> bool:
        return self.state in PENDING

    @property
    def may_not_start(self) -> bool:
        """Whether it waits for what the cluster, as it is configured, does not give."""
        return self.is_pending and self.reason in NEVER

    @property
    def has_ended(self) -> bool:
        return not self.problem and self.state not in LIVE

    @property
    def text(self) -> str:
        """``"pending (Priority)"``."""
        if self.problem:
            return f"unknown ({self.problem})"
        word = self.state.lower().replace("_", " ")
        # A job that was cancelled keeps the reason for which it had waited.
        says = self.reason not in ("", "None") and self.state != "CANCELLED"
        return f"{word} ({self.reason})" if says else word


class SlurmJob:
    """A job that was submitted."""

    def __init__(self, number: str):
        self.number = number
        self._state = JobState("PENDING")
        self._asked = 0.0

    def state(self, *, fresh: bool = False) -> JobState:
        """How it is; at most ``ASK_S`` old."""
        if fresh or time.monotonic() - self._asked > ASK_S:
            self._state = self._ask()
            self._asked = time.monotonic()
        return self._state

    def seconds_left(self) -> float | None:
        """Until its time limit; None without one, or where Slurm does not say."""
        found = _run("squeue", "--noheader", f"--jobs={self.number}", "-o", "%L")
        return read_time(found.stdout.strip()) if found.returncode == 0 else None

    def _ask(self) -> JobState:
        # A job that has ended is listed for some minutes.
        found = _run("squeue", "--noheader", "--states=all", f"--jobs={self.number}", "-o", "%T|%r")
        if found.returncode == 0 and "|" in found.stdout:
            state, _, reason = found.stdout.strip().splitlines()[0].partition("|")
            return JobState(state, reason)
        if found.returncode == 0 or "Invalid job id" in found.stderr:
            return JobState("ENDED")
        return JobState("", problem=(found.stderr.strip().splitlines() or ["squeue fails"])[-1])

    def give_back(self) -> None:
        """Cancel it if it does not end by itself, and wait until it is gone from the queue."""
        deadline = time.monotonic() + OWN_END_S
        try:
            while self.state(fresh=True).state == "RUNNING" and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:  # also if somebody presses Ctrl-C once more
            if not self.state().has_ended:
                _run("scancel", self.number)
        deadline = time.monotonic() + END_S
        while not (state := self.state(fresh=True)).has_ended and time.monotonic() < deadline:
            time.sleep(0.5 if state.problem else 0.1)


def read_time(text: str) -> float | None:
    """Seconds of Slurm's ``days-hours:minutes:seconds``; None of what is no time."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:  # UNLIMITED, NOT_SET, INVALID
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
