"""What outcomes of torch's tests come to, and that the page lists the exceptions that there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch_suites.exceptions import EXCEPTIONS, REASONS, table
from tests.torch_suites.outcome import Outcome, Result, Verdict, exit_code, summary
from tests.torch_suites.suites import SUITES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/compatibility.md"
PASSED, FAILED, SKIPPED = (Outcome(status) for status in ("passed", "failed", "skipped"))
TIMEOUT, DIED = Outcome("timeout"), Outcome("died")
UNUSABLE = Outcome("passed", unusable="RunError: rank 1 died\nand more")
LISTED = {"suite.listed": "a reason"}


def result(plain: Outcome, here: Outcome | None, anew: Outcome | None = None) -> Result:
    return Result("suite", "method", plain, here, anew)


@pytest.mark.parametrize(
    ("plain", "here", "verdict"),
    [
        (SKIPPED, None, Verdict.SKIPPED),
        (PASSED, PASSED, Verdict.PASSED),
        (FAILED, PASSED, Verdict.PASSED),
        (FAILED, FAILED, Verdict.FAILED_IN_BOTH),
        (TIMEOUT, FAILED, Verdict.FAILED_IN_BOTH),
        (PASSED, FAILED, Verdict.FAULT),
        (PASSED, SKIPPED, Verdict.FAULT),
        (PASSED, TIMEOUT, Verdict.FAULT),
        (PASSED, DIED, Verdict.FAULT),
        (PASSED, UNUSABLE, Verdict.FAULT),
        (FAILED, UNUSABLE, Verdict.FAULT),
        (DIED, UNUSABLE, Verdict.FAILED_IN_BOTH),
    ],
)
def test_what_two_outcomes_come_to(plain: Outcome, here: Outcome, verdict: Verdict) -> None:
    assert result(plain, here).verdict({}) is verdict
    failed = verdict is Verdict.FAULT
    assert exit_code([result(PASSED, PASSED), result(plain, here)], {}) == int(failed)


def test_the_first_result_counts_not_that_of_new_ranks() -> None:
    again = result(PASSED, FAILED, anew=PASSED)

    assert again.verdict({}) is Verdict.FAULT
    assert "suite.method: plain passed, here failed; on new ranks: passed" in summary([again], {})


def test_a_listed_exception_is_no_fault_unless_the_session_is_unusable() -> None:
    listed = Result("suite", "listed", PASSED, FAILED)
    unusable = Result("suite", "listed", PASSED, UNUSABLE)

    assert exit_code([listed], LISTED) == 0
    assert exit_code([unusable], LISTED) == 1
    assert exit_code([result(PASSED, FAILED)], LISTED) == 1


def test_a_test_of_ours_has_to_pass_in_plain_processes() -> None:
    for plain, here in ((FAILED, FAILED), (FAILED, PASSED), (SKIPPED, None)):
        ours = Result("suite", "listed", plain, here, is_ours=True)
        assert exit_code([ours], LISTED) == 1
        assert f"plain {plain.status}" in summary([ours], LISTED)


def test_an_exception_that_passes_is_told() -> None:
    listed = Result("suite", "listed", PASSED, PASSED)

    assert "suite.listed passes, but is listed as an exception" in summary([listed], LISTED)
    assert exit_code([listed], LISTED) == 0


def test_a_run_of_nothing_fails() -> None:
    assert exit_code([], {}) == 2


def test_the_summary_counts_and_shows_what_ranks_say() -> None:
    here = Outcome("failed", {1: "Traceback\nValueError: five"}, unusable="rank 1 died\nand more")
    text = summary([result(PASSED, here), result(PASSED, PASSED), result(SKIPPED, None)], {})

    assert text.splitlines() == [
        "3 methods",
        "  1 pass",
        "  1 are skipped by torch",
        "  1 are faults",
        "suite.method: plain passed, here failed",
        "  the session cannot be used after it: rank 1 died",
        "  [rank 1] Traceback",
        "  [rank 1] ValueError: five",
    ]


def test_the_page_lists_the_exceptions() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]

    assert rows == table()
    assert len(EXCEPTIONS) == sum(len(methods) for methods in REASONS.values())


def test_exceptions_are_methods_that_there_are() -> None:
    pytest.importorskip("expecttest", reason="torch's tests need it")
    wanted = {method.partition(".")[0] for method in EXCEPTIONS}
    assert wanted <= {suite.name for suite in SUITES}
    command = [sys.executable, "-m", "tests.torch_suites", "--list"]
    command += [part for name in sorted(wanted) for part in ("--suite", name)]
    # In a process of its own: torch's tests change what they are imported into.
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)

    assert listed.returncode == 0, listed.stderr
    assert set(EXCEPTIONS) <= set(listed.stdout.split())


def test_a_name_that_no_method_has_fails() -> None:
    command = [sys.executable, "-m", "tests.torch_suites", "--suite", "store", "--only", "nothing"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)

    assert ran.returncode == 2, ran.stderr
