"""A graph of the stand-in's: what it does when it is replayed is issued without our groups.

Importing this gives ``torch.standin`` a class ``Graph`` with methods of ``torch.cuda.CUDAGraph``.
It does not capture: what runs between its beginning and its end runs as ever, and what a replay
issues is told beforehand. That the device computes during a capture is a falsehood, and that events
may be asked during one, too.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.standin import register, runtime

__all__ = ["Graph"]


class Graph:
    """Issues the same things whenever it is replayed.

    Args:
        issue: Does so, past all that is recorded.
    """

    is_captured = False

    def __init__(self, issue: Callable[[], object] = lambda: None):
        self._issue = issue

    def capture_begin(self) -> None:
        if self.is_captured:
            raise RuntimeError("this graph has been captured")

    def capture_end(self) -> None:
        self.is_captured = True

    def replay(self) -> None:
        self._issue()


runtime.Graph = Graph  # type: ignore[attr-defined]
assert register
