"""Agents that are the tasks of an array job, one for each host: Grid Engine, PBS, LSF, HTCondor.

What differs between these is what stands in the job's script, and the words for its state.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar

from distsession.cluster.host_jobs import BatchLauncher
from distsession.cluster.host_launchers import STOP_S, Failure

__all__ = ["CondorLauncher", "LsfLauncher", "PbsLauncher", "SgeLauncher"]

ASK_S = 1.0
"""Seconds for which an answer of the scheduler counts."""
GONE_S = 5.0
"""Seconds for which a job is not listed before it counts as ended: a scheduler that is asked too
often may not answer, and one may list a job some moments after it has taken it."""


_NO_JOB = re.compile("unknown job|has finished|is not found|no matching", re.IGNORECASE)
"""What PBS and LSF say of a job that they no longer know; they fail with it."""


class _NoAnswerError(Exception):
    """A scheduler does not answer, so nothing is known of its jobs."""


def _asked(*command: str) -> str:
    """What a program says of a job; nothing where the scheduler has no such job."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    if _NO_JOB.search(done.stdout + done.stderr):
        return ""
    raise _NoAnswerError


class _ArrayLauncher(BatchLauncher):
    """Agents that are the tasks of an array job."""

    waiting: ClassVar[Collection[str]]
    """States of a task that does not run yet."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._states: list[str] | None = None
        self._asked_at = 0.0
        self._was_listed = False
        self._listed_at = time.monotonic()

    def start(self) -> None:
        super().start()
        self._listed_at = time.monotonic()

    @abstractmethod
    def _script(self) -> list[str]:
        """The lines of the script. ipyparallel fills in what stands in braces."""

    @abstractmethod
    def _ask(self) -> list[str]:
        """The states of the tasks that have not ended, in the scheduler's words.

        Raises:
            _NoAnswerError: the scheduler does not answer.
        """

    def _arguments(self) -> dict[str, Any]:
        """For the launcher of ipyparallel."""
        return {
            "work_dir": self.folder,
            "batch_template": "\n".join([*self._script(), ""]),
            "engine_cmd": self.agent(self.keys),
            "engine_args": [],
            "job_id_regexp_group": 1,
        }

    def _now(self, *, fresh: bool = False) -> list[str] | None:
        """The states of the tasks that have not ended; None while the scheduler does not answer."""
        if fresh or time.monotonic() - self._asked_at > ASK_S:
            try:
                self._states = self._ask()
            except _NoAnswerError:
                self._states = None
            self._asked_at = time.monotonic()
            self._was_listed = self._was_listed or bool(self._states)
            if self._states != []:
                self._listed_at = self._asked_at
        return self._states

    def is_waiting(self) -> bool:
        return any(state in self.waiting for state in self._now() or ())

    def failures(self) -> list[Failure]:
        if not self.job or self._now() != [] or time.monotonic() - self._listed_at < GONE_S:
            return []
        return [Failure("", f"job {self.job} has ended", self.outputs()[""])]

    def waits_for(self) -> str:
        states = self._now()
        if states is None:
            state = "(the scheduler does not answer)"
        else:
            state = ", ".join(sorted(set(states))) or "not listed"
        return f"job {self.job} {state}, {self.plan.count} tasks"

    def stop(self) -> None:
        if self.job and not self._ends_by_itself():
            with contextlib.suppress(subprocess.CalledProcessError):
                self._launcher.stop()

    def _ends_by_itself(self) -> bool:
        deadline = time.monotonic() + STOP_S
        unlisted = 0
        while time.monotonic() < deadline:
            states = self._now(fresh=True)
            if self.is_waiting():
                return False  # its agents have not begun, so they cannot end
            unlisted = unlisted + 1 if states == [] else 0
            # A job that has just been taken may not be listed yet.
            if unlisted == (1 if self._was_listed else 2):
                return True
            time.sleep(ASK_S if unlisted else 0.2)
        return False


class SgeLauncher(_ArrayLauncher):
    """Grid Engine."""

    submit = "qsub"
    waiting = ("qw", "hqw", "hRwq", "Rqw", "Eqw")

    def _script(self) -> list[str]:
        lines = [f"#$ -{name} {value}" for name, value in self.plan.options.items()]
        return [
            "#!/bin/sh", "#$ -V", "#$ -S /bin/sh", "#$ -N distsession", "#$ -r no", "#$ -j y",
            "#$ -o {output_file}", "#$ -t 1-{n}", *lines, "exec {program_and_args}",
        ]  # fmt: skip

    def _make(self) -> Any:
        from ipyparallel.cluster.launcher import SGEEngineSetLauncher

        said = r"[Yy]our job(?:-array)? (\d+)"
        return SGEEngineSetLauncher(job_id_regexp=said, **self._arguments())

    def _ask(self) -> list[str]:
        rows = [line.split() for line in _asked("qstat").splitlines()]
        return [row[4] for row in rows if len(row) > 4 and row[0] == self.job]


class PbsLauncher(_ArrayLauncher):
    """OpenPBS and PBS Pro, or Torque, which writes an array in another way."""

    submit = "qsub"
    waiting = ("Q", "H", "W", "T")

    def _script(self) -> list[str]:
        lines = [
            f"#PBS -{name} {value}" if len(name) == 1 else f"#PBS -l {name}={value}"
            for name, value in self.plan.options.items()
        ]
        # OpenPBS knows no array of one.
        array = ["#PBS -J 1-{n}"] if self.plan.count > 1 else []
        if self._is_torque():
            array = ["#PBS -t 1-{n}"]
        return [
            "#!/bin/sh", "#PBS -V", "#PBS -S /bin/sh", "#PBS -N distsession", "#PBS -r n",
            "#PBS -j oe", "#PBS -o {output_file}", *array, *lines, "exec {program_and_args}",
        ]  # fmt: skip

    def _is_torque(self) -> bool:
        done = subprocess.run(["qsub", "--version"], capture_output=True, text=True, check=False)
        return "pbs_version" not in done.stdout + done.stderr

    def _make(self) -> Any:
        from ipyparallel.cluster.launcher import PBSEngineSetLauncher

        return PBSEngineSetLauncher(job_id_regexp=r"(?m)^(\d\S*)", **self._arguments())

    def _ask(self) -> list[str]:
        # Of all tasks, where it is an array; "B" is an array of which tasks have begun.
        said = _asked("qstat", "-t", self.job)
        rows = [line.split() for line in said.splitlines() if line[:1].isdigit()]
        return [row[-2] for row in rows if len(row) > 4 and row[-2] not in ("B", "C", "F", "X")]


class LsfLauncher(_ArrayLauncher):
    """IBM Spectrum LSF."""

    submit = "bsub"
    waiting = ("PEND", "PSUSP", "WAIT")

    def _script(self) -> list[str]:
        lines = [f"#BSUB -{name} {value}" for name, value in self.plan.options.items()]
        return [
            "#!/bin/sh", "#BSUB -env all", '#BSUB -J "distsession[1-{n}]"', "#BSUB -rn",
            "#BSUB -o {output_file}", *lines, "exec {program_and_args}",
        ]  # fmt: skip

    def _make(self) -> Any:
        from ipyparallel.cluster.launcher import LSFEngineSetLauncher

        return LSFEngineSetLauncher(job_id_regexp=r"Job <(\d+)>", **self._arguments())

    def _submit(self) -> None:
        # bsub reads its script from standard input; what ipyparallel does for that is a line of a
        # shell that it puts together without quotes.
        launcher = self._launcher
        launcher.write_batch_script(self.plan.count)
        with open(launcher.batch_file, "rb") as script:
            said = subprocess.run(
                launcher.submit_command, stdin=script, stdout=subprocess.PIPE, check=True
            ).stdout
        launcher.notify_start(launcher.parse_job_id(said.decode(errors="replace")))

    def _ask(self) -> list[str]:
        said = _asked("bjobs", "-noheader", "-o", "stat", self.job).split()
        return [state for state in said if state not in ("DONE", "EXIT")]


class CondorLauncher(_ArrayLauncher):
    """HTCondor."""

    submit = "condor_submit"
    waiting = ("idle", "held")

    STATES: ClassVar[dict[str, str]] = {
        "1": "idle", "2": "running", "5": "held", "6": "running", "7": "suspended",
    }  # fmt: skip
    """By ``JobStatus``; 3 and 4 have ended."""

    def _script(self) -> list[str]:
        program, *arguments = self.agent(self.keys)
        # Arguments in single quotes, which are doubled where they stand for themselves.
        quoted = " ".join("'" + each.replace("'", "''") + "'" for each in arguments)
        quoted = quoted.replace('"', '""').replace("{", "{{").replace("}", "}}")
        return [
            "universe = vanilla", f"executable = {program}", f'arguments = "{quoted}"',
            "transfer_executable = False", "should_transfer_files = NO", "getenv = True",
            "output = {output_file}", "error = {output_file}", "batch_name = distsession",
            *(f"{name} = {value}" for name, value in self.plan.options.items()), "queue {n}",
        ]  # fmt: skip

    def _make(self) -> Any:
        from ipyparallel.cluster.launcher import HTCondorEngineSetLauncher

        return HTCondorEngineSetLauncher(job_id_regexp=r"cluster (\d+)", **self._arguments())

    def _ask(self) -> list[str]:
        codes = _asked("condor_q", self.job, "-autoformat", "JobStatus").split()
        return [self.STATES[code] for code in codes if code in self.STATES]
