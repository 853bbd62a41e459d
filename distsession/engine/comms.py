"""Comms of a rank: what connects a widget here with its views in the page.

Libraries open comms by the ``comm`` package, which lets a kernel say what a comm is. Here it is
one that sends by the rank's output, in order with text and displays. The kernel publishes what it
sends, and passes on what views answer. That is handled in the main thread between requests, as a
kernel does it between cells.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import comm
from comm.base_comm import BaseComm
from jupyter_client.jsonutil import json_default

from distsession.engine.capture import Capture
from distsession.protocol.messages import CommInput, CommMessage

__all__ = ["Comms"]


class _Comm(BaseComm):
    def __init__(self, comms: Comms, *args: Any, **kwargs: Any):
        self._comms = comms
        super().__init__(*args, **kwargs)

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: list[Any] | None = None,
        **keys: Any,
    ) -> None:
        self._comms.publish(self.comm_id, msg_type, data, metadata, buffers, **keys)


class Comms:
    """The comms of this rank.

    Args:
        rank: The rank.
        process: The generation of the group that this process was started for.
        capture: Sends what comms send.
        on_input: Called, from any thread, when something has come from the page.
    """

    def __init__(self, rank: int, process: int, capture: Capture, on_input: Callable[[], object]):
        self._rank = rank
        self._process = process
        self._capture = capture
        self._on_input = on_input
        self._input: deque[CommInput] = deque()

    def install(self, elsewhere: Callable[[], bool]) -> None:
        """Have comms of this process be ours from here on.

        Args:
            elsewhere: Whether what runs just now has comms of its own.
        """
        plain = comm.create_comm

        def create(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs) if elsewhere() else _Comm(self, *args, **kwargs)

        comm.create_comm = create

    def publish(
        self,
        comm_id: str,
        kind: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: list[Any] | None = None,
        **keys: Any,
    ) -> None:
        """Send something after all text that was written before it.

        Raises:
            TypeError: The data are not JSON.
        """
        content, metadata = json.loads(
            json.dumps([{"data": data or {}, **keys}, metadata or {}], default=json_default)
        )
        parts = tuple(bytes(buffer) for buffer in buffers or ())
        request = self._capture.running
        self._capture.show(
            CommMessage(self._rank, request, self._process, kind, comm_id, content, metadata, parts)
        )

    # --- from the page ----------------------------------------------------------------------------

    @property
    def has_input(self) -> bool:
        """Whether something has come from the page."""
        return bool(self._input)

    def put(self, message: CommInput) -> None:
        """From any thread: something has come from the page."""
        self._input.append(message)
        self._on_input()

    def handle(self, run: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """In the main thread: call what waits for it.

        Args:
            run: Within what it is called, so that it can be interrupted.
        """
        while self._input:
            message = self._input.popleft()
            try:
                with run():
                    _handle(message)
            except KeyboardInterrupt:
                sys.stderr.write("KeyboardInterrupt: a widget's callback was stopped.\n")
            except Exception:
                traceback.print_exc(file=sys.stderr)


def _handle(message: CommInput) -> None:
    manager = comm.get_comm_manager()
    if message.comm_id not in manager.comms:
        return
    made = {
        "header": {"msg_type": message.kind, "msg_id": ""},
        "content": {"comm_id": message.comm_id, "data": message.data},
        "metadata": message.metadata,
        "buffers": list(message.buffers),
    }
    handle = manager.comm_close if message.kind == "comm_close" else manager.comm_msg
    handle(None, "", made)  # which logs exceptions of the user's code
