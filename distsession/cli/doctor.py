"""``distsession doctor``: what would keep a session from working, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from distsession.cli import hosts as several_hosts
from distsession.cli import machine, trial
from distsession.cli.finding import Finding
from distsession.cli.packages import packages
from distsession.host_plan import HostPlan

__all__ = ["examine"]

Check = Callable[[], Iterable[Finding]]


def examine(
    options: Mapping[str, Any], *, hosts: HostPlan | None = None, as_json: bool = False
) -> int:
    """Look at everything, and tell.

    Args:
        options: Of the session that is tried.
        hosts: Look at these instead of trying a session here.
        as_json: Print one JSON object at the end, instead of lines as things are found.

    Returns:
        The exit code: 1 if something does not work.
    """
    if hosts is not None:
        trials: list[Check] = [lambda: several_hosts.check_hosts_of(hosts)]
    else:
        trials = [lambda: trial.session(options), trial.notebook]
    checks: list[Check] = [packages, *machine.CHECKS, *trials]
    findings = []
    for finding in _found(checks):
        findings.append(finding)
        if not as_json:
            _tell(finding)
    failed = sum(finding.fatal for finding in findings)
    if as_json:
        print(json.dumps([{"mark": each.mark, **asdict(each)} for each in findings], indent=2))
    else:
        limits = sum(finding.mark == "warn" for finding in findings)
        told = f"{failed} that stop a session or a part of it, {limits} that may limit one."
        print(f"\n{told if failed or limits else 'Nothing is missing.'}")
    return 1 if failed else 0


def _found(checks: Iterable[Check]) -> Iterator[Finding]:
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # what else is wrong is still to be told
            name = getattr(check, "__name__", "session").strip("_").replace("_", " ")
            yield Finding(
                name,
                f"{type(error).__name__}: {error}",
                "the doctor could not look at this: mend what is above first",
                fatal=True,
            )


def _tell(finding: Finding) -> None:
    print(f"{finding.mark:>4}  {finding.what:<22} {finding.value}", flush=True)
    for line in finding.details.splitlines():
        print(f"{'':30}{line}", flush=True)
    if finding.mend:
        print(f"{'':30}-> {finding.mend}", flush=True)
