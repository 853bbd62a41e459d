"""Errors that the message of another one tells of, and long messages."""

from __future__ import annotations

import re

import pytest

from distsession.display import render
from distsession.display.nested import nested_error, reason_of
from distsession.protocol.messages import ErrorInfo, FrameInfo

IN_CELL = (FrameInfo("In[7]", 9, "<module>"),)
WORKER = (
    "Caught ValueError in DataLoader worker process 0.\n"
    "Original Traceback (most recent call last):\n"
    '  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 3, in _worker_loop\n'
    "    data = fetcher.fetch(index)\n"
    '  File "In[7]", line 4, in __getitem__\n'
    "    raise ValueError('bad: sample')\n"
    "ValueError: bad: sample\n"
)
SPAWNED = (
    "\n\n-- Process 1 terminated with the following error:\n"
    "Traceback (most recent call last):\n"
    '  File "/x/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap\n'
    "    fn(i, *args)\n"
    '  File "/home/me/train.py", line 12, in work\n'
    "    return load(path)\n"
    "package.errors.LoadError: first\nand second\n"
)
CHECKPOINT = (
    "CheckpointException ranks:dict_keys([0, 2])\n"
    "Traceback (most recent call last): (RANK 0)\n"
    '  File "/x/site-packages/torch/distributed/checkpoint/utils.py", line 1, in reduce_scatter\n'
    "KeyError: 'weight'\n"
    "Traceback (most recent call last): (RANK 2)\n"
    '  File "/x/site-packages/torch/distributed/checkpoint/utils.py", line 1, in reduce_scatter\n'
    "ValueError: Size mismatch\n"
)
DYNAMO = (
    "Data-dependent branching\n  Explanation: a long one.\n\nfrom user code:\n"
    '   File "In[7]", line 3, in f\n    if x.sum() > 0:\n\nSet TORCHDYNAMO_VERBOSE=1\n'
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ErrorInfo("ValueError", WORKER, IN_CELL),
            "ValueError on rank 1 at In[7] line 4: bad: sample (raised again at In[7] line 9)",
        ),
        (
            ErrorInfo("ProcessRaisedException", SPAWNED, IN_CELL),
            "LoadError on rank 1 at train.py line 12: first ... and second (raised again at "
            "In[7] line 9 as ProcessRaisedException)",
        ),
        (
            ErrorInfo("ProcessRaisedException", SPAWNED[:-2] + WORKER, IN_CELL),
            "ValueError on rank 1 at In[7] line 4: bad: sample (raised again at In[7] line 9 as "
            "ProcessRaisedException)",
        ),
        (
            ErrorInfo("Unsupported", DYNAMO, IN_CELL),
            "Unsupported on rank 1 at In[7] line 3: Data-dependent branching: a long one "
            "(called at In[7] line 9)",
        ),
        (
            ErrorInfo("ValueError", "says 'from user code:' only", IN_CELL),
            "ValueError on rank 1 at In[7] line 9: says 'from user code:' only",
        ),
        (
            ErrorInfo("ValueError", "no Traceback (most recent call last):", IN_CELL),
            "ValueError on rank 1 at In[7] line 9: no Traceback (most recent call last):",
        ),
        (
            ErrorInfo("ExceptionGroup", "many", IN_CELL, ("contains KeyError at In[7] line 2: 1",)),
            "ExceptionGroup on rank 1 at In[7] line 9: many; KeyError at In[7] line 2: 1",
        ),
    ],
)
def test_the_innermost_error_and_its_line_lead(error: ErrorInfo, line: str) -> None:
    assert render.error_line((1,), error, {}) == line


@pytest.mark.parametrize(
    ("message", "ranks", "who"),
    [
        (CHECKPOINT, (0, 1, 2), "rank 2"),
        (CHECKPOINT.replace("ValueError: Size mismatch", "KeyError: 'weight'"), (0, 1, 2), "0,2"),
        (CHECKPOINT, (1, 2, 3), "ranks 1-3"),  # a group's own numbers, perhaps
        (CHECKPOINT, (0, 1), "ranks 0-1"),
        (CHECKPOINT.replace("RANK 0", "RANK 1"), (0, 1, 2), "rank 2"),
        (WORKER, (0, 1, 2), "ranks 0-2"),
    ],
)
def test_of_an_error_that_all_ranks_tell_of_those_come_first_that_raised_it(
    message: str, ranks: tuple[int, ...], who: str
) -> None:
    where = {rank: f"host{rank}, cpu" for rank in ranks}
    line = render.error_line(ranks, ErrorInfo("CheckpointException", message, IN_CELL), where)
    first, _, again = line.partition(" (raised again")
    assert re.match(rf"\w+ on (ranks )?{who} \(", first), line
    others = render.ranks_text(ranks)
    assert again.startswith(" at In[7]" if others in first else f" on {others} at In[7]"), line


def test_a_message_without_an_error_has_none() -> None:
    assert nested_error(ErrorInfo("ValueError", "no")) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("", ""),
        ("\n no \n", "no"),
        ("in a file:\n\tno such key", "in a file: no such key"),
        ("it failed\nstep 1: done\nno disk is left", "it failed ... no disk is left"),
        ("stopped\nException raised from doWait at x.cpp:1\nframe #0: y", "stopped"),
    ],
)
def test_a_reason_has_the_beginning_and_the_end(message: str, reason: str) -> None:
    assert reason_of(message) == reason


def test_of_a_long_reason_both_ends_are_told() -> None:
    reason = reason_of(f"first {'x' * 9999} last")
    assert reason.startswith("first xxx")
    assert reason.endswith("xxx last")
    assert len(reason) <= 500
