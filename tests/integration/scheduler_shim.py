"""Plays the programs of PBS, LSF and HTCondor.

Called as ``scheduler_shim.py NAME FOLDER VERSION ARGUMENT...``. It reads a script as the program of
that name would, runs its tasks on this machine, and lists and ends them in the words that the
manuals have. ``VERSION`` is what ``qsub --version`` says. While the file ``silent`` has a number in
it, that many questions are not answered.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

name, folder, version, *arguments = sys.argv[1:]
record = Path(folder, "tasks")


def find(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else ""


def run(command: Sequence[str], count: int, output: str) -> None:
    Path(folder, "submitting").touch()
    time.sleep(float(os.environ.get("SHIM_SUBMITS_IN_S", "0")))
    for place in range(1, count + 1):
        task = subprocess.Popen(
            command, env={**os.environ, "SLURMD_NODENAME": f"node{place}"},
            stdin=subprocess.DEVNULL, stdout=open(output, "ab"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        with record.open("a") as file:
            file.write(f"{task.pid}\n")


def living() -> dict[int, int]:
    """The pids of the tasks that have not ended, by their number."""
    pids = [int(pid) for pid in record.read_text().split()] if record.exists() else []
    return {number: pid for number, pid in enumerate(pids, 1) if lives(pid)}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def qsub() -> None:
    if arguments == ["--version"]:
        print(version)
        return
    script = Path(arguments[0]).read_text()
    if "#PBS -q nosuch" in script:
        sys.exit("qsub: Unknown queue")
    letter = "J" if "pbs_version" in version else "t"
    count = find(rf"^#PBS -{letter} 1-(\d+)$", script)
    run(["sh", arguments[0]], int(count or 1), find(r"^#PBS -o (.*)$", script))
    print("4711[].server" if count else "4711.server")


def qstat() -> None:
    print("Job id            Name             User              Time Use S Queue")
    print("----------------  ---------------- ----------------  -------- - -----")
    print("4711[].server     distsession      me                       0 B workq")
    for number in living():
        print(f"4711[{number}].server    distsession      me               00:00:01 R workq")


def bsub() -> None:
    script = sys.stdin.read()
    if "#BSUB -q nosuch" in script:
        sys.exit("nosuch: No such queue. Job not submitted.")
    spooled = Path(folder, "spooled")
    spooled.write_text(script)
    count = find(r'^#BSUB -J "distsession\[1-(\d+)\]"$', script)
    run(["sh", str(spooled)], int(count), find(r"^#BSUB -o (.*)$", script))
    print("Job <4711> is submitted to default queue <normal>.")


def condor_submit() -> None:
    script = Path(arguments[0]).read_text()
    if "nosuch" in script:
        sys.exit("ERROR: Failed to parse command file")
    quoted = find(r'^arguments = "(.*)"$', script).replace('""', '"')
    # Words stand in single quotes, in which a doubled one is one of the word.
    words = [word[1:-1].replace("''", "'") for word in re.findall(r"'(?:[^']|'')*'", quoted)]
    count = int(find(r"^queue (\d+)$", script))
    run([find("^executable = (.*)$", script), *words], count, find("^output = (.*)$", script))
    print(f"Submitting job(s)..\n{count} job(s) submitted to cluster 4711.")


def delete() -> None:
    Path(folder, "deleted").write_text(arguments[0])
    for pid in living().values():
        os.killpg(pid, signal.SIGTERM)


PROGRAMS: dict[str, Callable[[], None]] = {
    "qsub": qsub,
    "qstat": qstat,
    "qdel": delete,
    "bsub": bsub,
    "bjobs": lambda: print("RUN\n" * len(living())),
    "bkill": delete,
    "condor_submit": condor_submit,
    "condor_q": lambda: print("2\n" * len(living())),
    "condor_rm": delete,
}

NO_JOB = {
    "qstat": "qstat: 4711[].server Job has finished, use -x or -H to obtain its history",
    "bjobs": "Job <4711> is not found",
    "condor_q": "",
}
"""What is said of a job that has ended; HTCondor says nothing."""


def does_not_answer() -> bool:
    """Whether this question is among those that find the server away."""
    silent = Path(folder, "silent")
    left = int(silent.read_text()) if silent.exists() else 0
    if left:
        silent.write_text(str(left - 1))
    return left > 0


if __name__ == "__main__":
    if name in NO_JOB:
        if does_not_answer():
            sys.exit("cannot connect to the server (errno=111)")
        if not living() and NO_JOB[name]:
            sys.exit(NO_JOB[name])
    PROGRAMS[name]()
