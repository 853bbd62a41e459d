"""What the checks of the helpers have in common, and what each of them shows."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

import distsession.distributed as dd

SHOWN: dict[tuple[str, str, str], str] = {}
"""For a source, its name and a sentence about it: the check that shows it."""

CHECKS: dict[str, Callable[[], None]] = {}

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "GROUP_",
    "NODE_",
)
"""How the names of launchers' variables begin."""


def shows(source: str, name: str, *told: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Mark a check with the sentences that it shows about a source's name."""

    def mark(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS[check.__name__.removeprefix("check_")] = check
        for sentence in told:
            SHOWN[source, name, sentence] = check.__name__
        return check

    return mark


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The body raises this, and the message has these words."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@contextmanager
def silent() -> Iterator[None]:
    """Nothing in the body warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the helpers log in the body, at level INFO or above."""
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, listener = logging.getLogger("distsession.distributed"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


@contextmanager
def variables(**given: object) -> Iterator[None]:
    """No launcher's variables but these."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    clean.update({name: str(value) for name, value in given.items()})
    with patch.dict(os.environ, clean, clear=True):
        yield


def here() -> tuple[int, int]:
    return dd.get_rank(), dd.get_world_size()


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)
