"""A line of input for code on a rank, from whoever sits at the notebook.

The question goes the way of the output, after all text before it; the answer comes to the control
thread. The main thread waits for it in Python, where Stop reaches it. Python's ``input`` is
replaced rather than ``sys.stdin``, for it knows the prompt. Debuggers ask by it, too.
"""

from __future__ import annotations

import builtins
import getpass
import os
import queue
import sys
import threading
from typing import Any

from distsession.engine.capture import Capture
from distsession.engine.collectives.recorder import Recorder
from distsession.engine.listeners import RequestListener
from distsession.protocol import board as layout
from distsession.protocol.messages import InputReply, InputRequest, Request

__all__ = ["NoInputError", "RankStdin"]


class NoInputError(EOFError):
    """There is nobody who could be asked; the message says why."""


class RankStdin(RequestListener):
    """Asks the kernel, on behalf of the main thread.

    Args:
        rank: Of this process.
        capture: Sends the questions.
        recorder: Shows others that this rank waits for an answer.
    """

    def __init__(self, rank: int, capture: Capture, recorder: Recorder):
        self.rank = rank
        self._capture = capture
        self._recorder = recorder
        self._replies: queue.SimpleQueue[InputReply] = queue.SimpleQueue()
        self._number = 0
        self._process = os.getpid()
        self.request = 0
        """The request that runs; 0 for none."""
        self.place = 0
        """Where the debugger stands, as a word of the board; 0 where none is open."""
        self.refusal = ""
        """Why the last question could not be asked."""

    def begin_request(self, request: Request) -> None:
        self.request = request.id

    def end_code(self, request: Request, error: BaseException | None) -> None:
        self.request = 0

    def install(self) -> None:
        """Let ``input()`` and ``getpass()`` ask."""

        def read_line(prompt: object = "", /) -> str:
            return self.read_line(str(prompt))

        def read_secret(prompt: str = "Password: ", stream: Any = None) -> str:
            return self.read_line(prompt, secret=True)

        read_line.__name__ = read_line.__qualname__ = "input"
        builtins.input = read_line
        getpass.getpass = read_secret

    @property
    def obstacle(self) -> str:
        """Why nothing can be asked from here; empty if it can."""
        if os.getpid() != self._process:
            return "a process that was forked from a rank cannot ask"
        if threading.current_thread() is not threading.main_thread():
            return "only a rank's main thread can ask"
        if not self.request:
            return "a rank can ask only in cells and functions that the session runs"
        return ""

    def read_line(self, prompt: str, *, secret: bool = False) -> str:
        """A line of input, without its end.

        Raises:
            NoInputError: There is nobody who could be asked.
            EOFError: The input is at its end, or the run was stopped.
        """
        self.refusal = ""
        if obstacle := self.obstacle:
            raise NoInputError(f"{obstacle}.")
        abort = self._recorder.abort
        if abort is not None and abort.interrupt == self.request:
            raise EOFError("the run was stopped.")
        self._number += 1
        words, start = self._recorder.words, self._recorder.region.start
        words[start + layout.ASKS_AT] = self.place or self._recorder.place_of(sys._getframe(1))
        words[start + layout.ASKS] = 1
        try:
            self._capture.show(InputRequest(self.rank, self.request, self._number, prompt, secret))
            reply = self._replies.get()
            while reply.number != self._number:  # to a question that a Stop has ended
                reply = self._replies.get()
        finally:
            words[start + layout.ASKS] = 0
        self.refusal = reply.why
        if reply.why:
            raise NoInputError(reply.why)
        if reply.text is None:
            raise EOFError("the input is at its end.")
        return reply.text

    def is_open(self, message: Any) -> bool:
        """Whether a message is no question, or one that still waits for its answer."""
        if not isinstance(message, InputRequest):
            return True
        words, start = self._recorder.words, self._recorder.region.start
        return bool(words[start + layout.ASKS]) and message.number == self._number

    def put_reply(self, reply: InputReply) -> None:
        """From the control thread: somebody has answered."""
        self._replies.put(reply)
