"""What passes in plain processes and does not pass on a session's ranks, and why.

``docs/compatibility.md`` has the same table; ``tests/unit/test_torch_suites.py`` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXCEPTIONS", "REASONS", "table"]

REASONS: Mapping[str, tuple[str, ...]] = {
    "A receive from any rank is one from the rank that sends, and a profiler names it `gloo:recv`, "
    "not `gloo:recvAnySource`.": (
        "distributed.test_send_recv_any_source_autograd_profiler",
        "distributed.test_send_recv_any_source_torch_profiler",
    ),
}
"""By the reason, in a sentence: the methods, as ``suite.method``."""

EXCEPTIONS = {method: reason for reason, methods in REASONS.items() for method in methods}


def table() -> list[str]:
    """The rows that the page has."""
    return [
        f"| {', '.join(f'`{method}`' for method in methods)} | {reason} |"
        for reason, methods in REASONS.items()
    ]
