"""Agents that are started by a job of a scheduler. Here is Slurm's; others are array jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import abstractmethod
from typing import Any

from distsession.cluster.host_launchers import (
    Failure,
    HostLauncher,
    check_program,
)
from distsession.cluster.interrupts import interrupts_held
from distsession.cluster.slurm_jobs import SlurmJob
from distsession.errors import LaunchError
from distsession.host_plan import HostPlan, flag

__all__ = ["BatchLauncher", "SlurmLauncher"]


_SUBMIT = "import os, sys; os.setsid(); os.dup2(1, 2); os.execvp(sys.argv[1], sys.argv[1:])"
"""Runs a program where a Ctrl-C of the notebook or terminal does not reach it, and has what it says
of an error come where it is read."""


class BatchLauncher(HostLauncher):
    """Agents that are started by a job of a scheduler."""

    submit = ""

    def __init__(self, plan: HostPlan, folder: str):
        super().__init__(plan, folder)
        self._launcher: Any = None

    @abstractmethod
    def _make(self) -> Any:
        """The launcher of ipyparallel."""

    def start(self) -> None:
        check_program(self.submit, self.plan.launcher)
        self._launcher = self._make()
        self._launcher.output_file = os.path.join(self.folder, "output")
        self._launcher.submit_command = [sys.executable, "-c", _SUBMIT, self.submit]
        try:
            # A job whose id nobody has read yet could not be given back.
            with interrupts_held():
                self._submit()
                self.job = self._launcher.job_id
        except subprocess.CalledProcessError as error:
            said = error.output.decode(errors="replace").strip()
            raise LaunchError(
                f"{self.submit} refuses the job: {said or f'exit code {error.returncode}'}",
                remedy=_submit_remedy(said),
            ) from None

    def _submit(self) -> None:
        self._launcher.start(self.plan.count)

    def output_files(self) -> dict[str, str]:
        return {"": os.path.join(self.folder, "output")}


def _submit_remedy(said: str) -> str:
    if "partition" in said:
        return "`sinfo` lists the partitions."
    if "account" in said.lower():
        return "Name an account of yours: `sacctmgr show associations user=$USER` lists them."
    if "Unable to contact" in said or "connect" in said.lower():
        return (
            "The scheduler does not answer: `scontrol ping` says which host it is on. A controller "
            "that listens on localhost only answers nobody else."
        )
    return ""


class SlurmLauncher(BatchLauncher):
    """A job of Slurm's with one task on each host."""

    submit = "sbatch"
    _slurm: SlurmJob | None = None

    def _make(self) -> Any:
        from ipyparallel.cluster.launcher import SlurmEngineSetLauncher

        options = {"job-name": "distsession", **self.plan.options}
        lines = [f"#SBATCH {flag(name, value)}" for name, value in options.items()]
        template = [
            "#!/bin/sh",
            *lines,
            "#SBATCH --nodes={n}",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --no-requeue",  # ranks that are lost are not to be started by themselves
            "#SBATCH --export=ALL",
            "#SBATCH --output={output_file}",
            # A step does not take over what the job has for each task, since Slurm 22.05.
            '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            "exec srun --kill-on-bad-exit=0 {program_and_args}",
            "",
        ]
        return SlurmEngineSetLauncher(
            work_dir=self.folder,
            batch_template="\n".join(template),
            job_id_regexp=r"Submitted batch job (\d+)",
            job_id_regexp_group=1,
            engine_cmd=self.agent(self.keys),
            engine_args=[],
        )

    def start(self) -> None:
        super().start()
        self._slurm = SlurmJob(self.job)

    def is_waiting(self) -> bool:
        return self._slurm is not None and self._slurm.state().is_pending

    def failures(self) -> list[Failure]:
        state = self._slurm.state() if self._slurm is not None else None
        if state is None or not state.has_ended:
            return []
        return [Failure("", f"job {self.job} has ended ({state.text})", self.outputs()[""])]

    def waits_for(self) -> str:
        assert self._slurm is not None
        state = self._slurm.state()
        never = "; it may never start: no part of the cluster gives that much" * state.may_not_start
        return f"job {self.job} {state.text}, {self.plan.count} nodes{never}"

    def seconds_left(self) -> float | None:
        return None if self._slurm is None else self._slurm.seconds_left()

    def stop(self) -> None:
        if self._slurm is not None:
            self._slurm.give_back()
