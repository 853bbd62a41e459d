"""What a rank can be at, how its part of a run ended, and why a process group is given up."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["NO_PART", "AbortReason", "Ending", "Outcome", "RankState"]


class RankState(enum.StrEnum):
    """What a rank is at.

    Attributes:
        IDLE: It waits for a request.
        RUNNING: It runs one.
        WAITING_FOR_INPUT: Its code waits for input.
        DEBUGGING: Its Python debugger waits for a command.
        STOPPED: Stopped by SIGSTOP.
        TRACED: A debugger of processes holds it.
        SILENT: Its control thread does not answer: its main thread holds the interpreter's lock,
            in C code, or the machine gives it no processor time.
        DEAD: Its process has ended.
    """

    IDLE = "idle"
    RUNNING = "running"
    WAITING_FOR_INPUT = "waiting for input"
    DEBUGGING = "debugging"
    STOPPED = "stopped"
    TRACED = "traced"
    SILENT = "silent"
    DEAD = "dead"

    @property
    def label(self) -> str:
        """In words, as a table has it."""
        return _LABELS.get(self, str(self))

    @property
    def is_halted(self) -> bool:
        """Whether something outside its code keeps it from going on."""
        return self in (RankState.STOPPED, RankState.TRACED)

    @property
    def is_asking(self) -> bool:
        """Whether it waits for a person."""
        return self in (RankState.WAITING_FOR_INPUT, RankState.DEBUGGING)


_LABELS = {
    RankState.DEBUGGING: "in the debugger",
    RankState.STOPPED: "stopped by SIGSTOP",
    RankState.TRACED: "held by a debugger",
    RankState.SILENT: "not answering",
}


class Ending(enum.Enum):
    """How a rank has ended its part of a run that others still work on."""

    FINISHED = enum.auto()
    FAILED = enum.auto()
    NO_PART = enum.auto()
    DIED = enum.auto()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank has ended its part of a run that others still work on.

    Attributes:
        ending: In which way.
        detail: What its error says, or how it died.
        ename: The class of its error.
    """

    ending: Ending
    detail: str = ""
    ename: str = ""

    @property
    def text(self) -> str:
        """In words, on one line: ``"failed: ValueError: x"``."""
        match self.ending:
            case Ending.FINISHED:
                return "finished"
            case Ending.FAILED:
                return f"failed: {self.reason}" if self.ename else "failed"
            case Ending.NO_PART:
                return "no part in this run"
            case Ending.DIED:
                return self.reason

    @property
    def reason(self) -> str:
        """Its error, or how it died, on one line: ``"ValueError: x"``."""
        first = self.detail.strip().partition("\n")[0]
        return f"{self.ename}: {first}" if self.ename else first


NO_PART = Outcome(Ending.NO_PART)
"""Of a rank that nothing was asked of, in a run beside which nothing else can be."""


class AbortReason(enum.StrEnum):
    """Why a process group is given up.

    Attributes:
        STOP: Somebody has stopped the run.
        FAILED: A rank has failed or died.
        HANG: Ranks wait for ranks that will not come.
        MISMATCH: Ranks have called different collectives.
        REPLACED: A rank was or is to be replaced.
        FORKED: This process is a copy of a rank, which shares the rank's connections.
        REFUSED: It is not; only requests are refused.
    """

    STOP = "stop"
    FAILED = "failed"
    HANG = "hang"
    MISMATCH = "mismatch"
    REPLACED = "replaced"
    FORKED = "forked"
    REFUSED = "refused"
