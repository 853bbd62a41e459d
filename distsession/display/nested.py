"""The reason of an error, where its message tells of another one, or is long.

A worker of a ``DataLoader`` and a process of ``spawn`` send the traceback of what they failed with
as text, and ``torch.compile`` says in its message which line of the user's code it was about. A
message of many lines begins with what was done and ends with why that failed.

Pure functions.
"""

from __future__ import annotations

import re

from distsession.protocol.messages import ErrorInfo, FrameInfo

__all__ = ["is_code_of_error", "nested_error", "ranks_told", "reason_of", "shortened_within"]

LONGEST_REASON = 500
_TRACEBACK = "Traceback (most recent call last):"
_OF_RANK = re.compile(rf"{re.escape(_TRACEBACK)} \(RANK (\d+)\)\n")
_USER_CODE = "from user code:"
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)(?:, in (.+))?$', re.MULTILINE)
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: (.*))?$", re.DOTALL)
_EXPLANATION = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)
_NOISE = re.compile(r"\n(?:Exception raised from |C\+\+ CapturedTraceback|frame #0: )")
"""Where the frames of C++ begin in what torch says."""


def is_code_of_error(error: ErrorInfo) -> bool:
    """Whether a message names lines of the user's code without another error."""
    return _TRACEBACK not in error.evalue and _USER_CODE in error.evalue


def nested_error(error: ErrorInfo) -> ErrorInfo | None:
    """The innermost error whose traceback, or whose line of code, is in the message of another.

    Args:
        error: That other one.
    """
    if is_code_of_error(error):
        before, _, within = error.evalue.rpartition(_USER_CODE)
        frames, reason = _frames(within), before.strip().partition("\n")[0]
        if explanation := _EXPLANATION.search(before):
            reason = f"{reason}: {explanation[1]}"
        return ErrorInfo(error.ename, reason, frames) if frames else None
    within = error.evalue.rpartition(_TRACEBACK)[2] if _TRACEBACK in error.evalue else ""
    frames = _frames(within)
    lines = within.splitlines()
    ends = [n for n, line in enumerate(lines) if _ERROR.match(line)]
    if not frames or not ends:
        return None
    found = _ERROR.match("\n".join(lines[ends[0] :]).strip())
    return ErrorInfo(found[1], found[2] or "", frames) if found else None


def ranks_told(message: str) -> list[int]:
    """The ranks on which the last error was raised that a message has tracebacks of.

    A checkpoint that fails on some ranks says so on all, with these ranks' tracebacks.
    """
    _, *parts = _OF_RANK.split(message.strip())
    told = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))
    reasons = {rank: text.strip().rpartition("\n")[2] for rank, text in told.items()}
    return [rank for rank, reason in reasons.items() if reason == list(reasons.values())[-1]]


def _frames(text: str) -> tuple[FrameInfo, ...]:
    return tuple(
        FrameInfo(found[1], int(found[2]), found[3] or "<module>")
        for found in _FRAME.finditer(text)
    )


def reason_of(message: str) -> str:
    """What a message says, on one line: how it begins and how it ends."""
    text = _NOISE.split(message, maxsplit=1)[0]
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    reason, *rest = lines
    while rest and reason.endswith(":"):
        reason = f"{reason} {rest.pop(0)}"
    if rest:
        reason = f"{shortened_within(reason, LONGEST_REASON // 2)} ... {rest[-1]}"
    return shortened_within(reason, LONGEST_REASON)


def shortened_within(text: str, longest: int) -> str:
    """A text that is cut in its middle, if it is too long: the reason may stand at either end."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 5]} ... {text[-end:]}"
