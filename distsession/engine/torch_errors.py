"""What errors of torch and gloo say: their texts are read here and nowhere else.

torch raises plain ``RuntimeError``s for whatever ends an operation (2.13), so that only the text
tells a closed connection from a time limit. The texts are those of gloo's ``transport/tcp`` (pair,
buffer and unbound buffer) and of torch's ``ProcessGroupWrapper``.
"""

from __future__ import annotations

import enum
import re

__all__ = ["Break", "classify", "is_from_gloo", "is_wait_over", "time_limit_s"]

_CLOSED = re.compile("[Cc]losed|reset by peer|[Bb]roken pipe")
"""gloo's "Connection closed by peer", and the system's own words for it."""
_LIMIT = re.compile(r"(\d+) ?ms")
"""In gloo's "Timed out waiting 5000ms for recv operation to complete" and its like."""


class Break(enum.Enum):
    """Why an operation broke off."""

    MISMATCH = "ranks called different operations, says torch's own comparison"
    CLOSED = "a connection was closed by the other end"
    TIMED_OUT = "a time limit"
    OTHER = "something else within gloo"
    OUTSIDE = "it was refused before it came to gloo"


def classify(text: str) -> Break:
    """Why an operation broke off, from what its error says."""
    if text.startswith("Detected mismatch between collectives"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        return Break.MISMATCH
    if "gloo" not in text and "timed out" not in text:
        return Break.OUTSIDE
    if _CLOSED.search(text):
        return Break.CLOSED
    return Break.TIMED_OUT if "imed out" in text else Break.OTHER


def time_limit_s(text: str) -> float:
    """The time limit that an error names, in seconds; 0 where it names none."""
    limit = _LIMIT.search(text)
    return int(limit[1]) / 1000 if limit else 0.0


def is_from_gloo(text: str) -> bool:
    """Whether an error was raised within gloo, also if C++ code has raised it again as its own."""
    return "/gloo/" in text  # each of its errors has the path of its source


def is_without_group(text: str) -> bool:
    """Whether code wanted a process group that there is none of."""
    return text.startswith("Default process group has not been initialized")


def is_wait_over(error: RuntimeError) -> bool:
    """Whether only ``Work.wait`` has ended, by its own limit; the operation goes on."""
    return "Operation timed out" in str(error)
