"""The stand-in does what it says. Each check is a program of its own, in ``checks.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin import required_or_reason

REASON = required_or_reason()
CHECKOUT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def run_program(*arguments: str) -> str:
    """Run Python in the checkout, at most two minutes; its output."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


CLASSES = ("standin", "standin2", "standin-lazy")


@pytest.mark.parametrize("backend", CLASSES)
@pytest.mark.parametrize(
    ("check", "ranks"),
    [
        ("numbers", 2),
        ("numbers", 4),
        ("asynchronous", 2),
        ("asynchronous", 4),
        ("split", 4),
        ("ddp", 2),
        ("fsdp", 2),
        ("synchronous_hang", 2),
        ("abort_of_another", 2),
        ("mismatch", 2),
        ("exit_while_hung", 2),
    ],
)
def test_check(check: str, ranks: int, backend: str) -> None:
    run_program("-m", "tests.standin.checks", check, str(ranks), backend)


@pytest.mark.parametrize(
    ("check", "ranks"),
    [
        ("numbers", 1),
        ("missing_peer", 2),
        ("lonely_init", 2),
        ("first_of_its_kind", 2),
        ("time_limit", 2),
        ("dead_peer", 2),
        ("order", 2),
        ("time_out", 2),
        ("broken", 1),
        ("tensors", 1),
        ("streams", 1),
    ],
)
def test_check_of_the_older_class_or_of_the_device(check: str, ranks: int) -> None:
    run_program("-m", "tests.standin.checks", check, str(ranks))


EACH = ("connected_at_once", "sync_gives_a_work", "aborted", "past_its_limit", "dropped")
EACH += ("shut_down", "put_together", "messages", "abort_of_pairs")


@pytest.mark.parametrize(
    ("check", "backend"),
    [(check, backend) for check in EACH for backend in CLASSES]
    + [(check, backend) for check in ("cleaned_up", "process_ended") for backend in CLASSES[1:]],
)
def test_classes_differ_as_those_of_nccl(check: str, backend: str) -> None:
    ranks = "3" if check == "messages" else "2"
    run_program("-m", "tests.standin.class_checks", check, ranks, backend)


def test_registering_starts_no_thread() -> None:
    program = (
        "import os, torch, torch.distributed\n"
        "before = os.listdir('/proc/self/task')\n"
        "import tests.standin.register\n"
        "assert os.listdir('/proc/self/task') == before\n"
        "assert torch.accelerator.current_accelerator() == torch.device('standin')\n"
        "assert os.listdir('/proc/self/task') == before\n"
        "torch.ones(2, device='standin').sum().item()\n"
        "assert len(os.listdir('/proc/self/task')) > len(before)\n"
    )
    run_program("-c", program)


def test_a_used_device_does_not_survive_a_fork() -> None:
    program = (
        "import os, torch, tests.standin.register\n"
        "x = torch.ones(2, device='standin') + 1\n"
        "x.sum().item()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    assert torch.standin._is_in_bad_fork()\n"
        "    try:\n"
        "        x.sum().item()\n"
        "    except RuntimeError as error:\n"
        "        os._exit(7 if 'forked subprocess' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )
    run_program("-c", program)
