"""The messages between kernel, agent and ranks.

Every message is a frozen dataclass. On the wire it is a frame of a short magic and the pickled
dataclass and, for some, the frames of a payload (see ``serialize``); a small one is in the first.
All sockets are in a folder that only the session's user can open, so a frame that arrives comes
from one of our own processes; one that cannot be read is a fault, never a reason to end a process:
``decode`` raises ``MalformedMessage`` and the reader drops it, counts it and logs it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from distsession.protocol.rank_state import AbortReason, Outcome, RankState
from distsession.ranks import RankInfo

__all__ = [
    "LIMITED_STORE_WAIT",
    "STORE_WAIT",
    "Abort",
    "Aborted",
    "Addressed",
    "Buffered",
    "CallRequest",
    "Called",
    "CellRequest",
    "ClearOutput",
    "CommInput",
    "CommMessage",
    "CommitRequest",
    "CompletionReply",
    "CompletionRequest",
    "ControllerInfo",
    "DebugRequest",
    "Display",
    "EngineRegistered",
    "ErrorInfo",
    "FillRequest",
    "FrameInfo",
    "InputReply",
    "InputRequest",
    "MalformedMessage",
    "Message",
    "Mismatch",
    "Operation",
    "OutputEnd",
    "PartsRequest",
    "PieceRequest",
    "PullRequest",
    "PushRequest",
    "RankAttached",
    "RankFailed",
    "RankReady",
    "RankReport",
    "Reason",
    "ReconnectRequest",
    "Reply",
    "Request",
    "Resume",
    "ReturnRequest",
    "ShardsRequest",
    "Shared",
    "StackReply",
    "StackRequest",
    "SummaryRequest",
    "Text",
    "TimedOut",
    "TimelineRequest",
    "decode",
    "encode",
]

MAGIC = b"ds1"
INLINE = 16 << 10
"""Bytes of a payload up to which it is copied into the frame of its message."""


class MalformedMessage(ValueError):
    """Frames that are no message of ours."""


def encode(message: Any, payload: Sequence[Any] | Shared | Buffered = ()) -> list[Any]:
    """The frames of a message and its payload: one, if the payload is small or elsewhere."""
    inline: tuple[bytes, ...] | None = None
    if isinstance(payload, (Shared, Buffered)):
        return [MAGIC + pickle.dumps((message, payload), protocol=5)]
    if not payload:
        inline = ()
    elif sum(memoryview(frame).nbytes for frame in payload) <= INLINE:
        inline = tuple(map(bytes, payload))
    head = MAGIC + pickle.dumps((message, inline), protocol=5)
    return [head] if inline is not None else [head, *payload]


def decode(frames: Sequence[Any]) -> tuple[Any, Sequence[Any] | Shared | Buffered]:
    """The message in some frames, and its payload, or where that is.

    Raises:
        MalformedMessage: The frames are not ours, or damaged.
    """
    if not frames or bytes(frames[0][: len(MAGIC)]) != MAGIC:
        raise MalformedMessage(f"{len(frames)} frames without our mark")
    try:
        message, inline = pickle.loads(memoryview(frames[0])[len(MAGIC) :])
    except Exception as error:
        raise MalformedMessage(f"a frame that does not unpickle: {error!r}") from error
    if not isinstance(message, Message):
        raise MalformedMessage(f"a {type(message).__name__} where a message should be")
    return message, frames[1:] if inline is None else inline


class Message:
    """What all messages have in common."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """As a call with all fields: a third of the time of what dataclasses do by themselves."""
        kind: Any = type(self)
        return kind, _fields_of(kind)(self)


@cache
def _fields_of(kind: Any) -> Callable[[Message], tuple[Any, ...]]:
    """What gives the values of all fields of a message, at once where that can be."""
    names: tuple[str, ...] = kind.__match_args__
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


# --- payloads -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shared(Message):
    """A payload that is not with its message, but in memory of which a descriptor was sent.

    Attributes:
        sender: Whose link it was sent on, or the receiver's where the kernel sends; empty where
            several ranks of another node are sent the same.
        number: Which of the descriptors of that link.
        sizes: Bytes of each frame.
    """

    sender: str
    number: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buffered(Message):
    """A payload that is to be copied out of its sender's ``SharedBuffer``.

    Attributes:
        number: How many buffers the sender had by then, this one included.
        at: Where the payload begins.
        sizes: Bytes of each frame.
    """

    number: int
    at: int
    sizes: tuple[int, ...]


# --- kernel to rank, on the request socket --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """The notebook's cell of a function that is on its way to a rank, which has no such file.

    Attributes:
        file: What its code has for the name of a file.
        label: What the notebook calls the cell, such as ``"In[3]"``; empty if that is not known.
        source: Its lines, for tracebacks and the debugger.
    """

    file: str
    label: str
    source: str


@dataclass(frozen=True, slots=True)
class CallRequest(Message):
    """Call a function. Payload: function, args, kwargs.

    Attributes:
        cells: Of the notebook's functions among them.
    """

    id: int
    name: str
    cells: tuple[NotebookCell, ...] = ()


@dataclass(frozen=True, slots=True)
class CellRequest(Message):
    """Run a cell of source code in the rank's namespace.

    Attributes:
        label: Stands for the file name in tracebacks, such as ``"In[3]"``.
        fetch: Send the value of the last expression back, not only what it displays as.
        expression: The source must be one expression.
        profile: Ranks on which torch's profiler is to run around it.
        debug: Ranks whose debugger stops at the first line.
    """

    id: int
    source: str
    label: str
    fetch: bool = False
    expression: bool = False
    profile: tuple[int, ...] = ()
    debug: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReconnectRequest(Message):
    """Leave the process group and join the one of another generation.

    Attributes:
        timeout: Seconds that each step of connecting it may take.
        begun: How many operations each rank has begun, where the connections are to stay as they
            are: it refuses if it has begun more since. Else nothing.
    """

    id: int
    generation: int
    timeout: float = 60.0
    begun: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PullRequest(Message):
    """Send the values of these names, in one payload, so that what they share stays shared.

    Attributes:
        names: Names, also of parts, such as ``"model.weight"`` or ``"losses[0]"``.
        lend: For another rank of this host: what is large on a device may stay there, and is held
            until a ``ReturnRequest``.
        for_ranks: For other ranks, so that a module with its process group may be among it.
    """

    id: int
    names: tuple[str, ...]
    lend: bool = False
    for_ranks: bool = False


@dataclass(frozen=True, slots=True)
class ReturnRequest(Message):
    """What was lent with a pull has been copied. Answer: whether it was the same all the while."""

    id: int


@dataclass(frozen=True, slots=True)
class PushRequest(Message):
    """Rebuild values and keep them aside. Payload: a dict by name, such as a pull has brought.

    They are assigned once all ranks have them, so a failure on one rank leaves the names as they
    were on all: by a word on the board where the ranks look for that, else by a ``CommitRequest``.
    Answer: why that word is not enough here; nothing where it is.

    Attributes:
        cells: Of the notebook's functions among the values.
        by_word: Look for that word.
    """

    id: int
    cells: tuple[NotebookCell, ...] = ()
    by_word: bool = False


@dataclass(frozen=True, slots=True)
class CommitRequest(Message):
    """Set names to the values that were pushed, or drop these values."""

    id: int
    keep: bool


@dataclass(frozen=True, slots=True)
class ShardsRequest(Message):
    """Say which part of the whole this rank holds under a name."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class FillRequest(Message):
    """Write this rank's parts into the whole. Payload: the whole, shared by the ranks of one host.

    A rank that gets no such memory keeps its part aside for ``PieceRequest`` and says where it
    belongs.

    Attributes:
        shape: Of the whole.
        at: Where the part of this rank begins in each dimension, by rank; a sharded tensor knows
            that itself.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    at: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PieceRequest(Message):
    """Send a piece of the part that a ``FillRequest`` has kept aside.

    Attributes:
        begin: Where it begins within the part, in each dimension; None lets go of the part.
        shape: Of the piece.
    """

    id: int
    begin: tuple[int, ...] | None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SummaryRequest(Message):
    """Evaluate an expression, say what its value consists of, and keep that for a moment.

    Attributes:
        label: Stands for the file name in tracebacks.
    """

    id: int
    expression: str
    label: str


@dataclass(frozen=True, slots=True)
class PartsRequest(Message):
    """Send parts of what was summarised; without paths, forget it."""

    id: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DebugRequest(Message):
    """Open the debugger where the last cell or call failed; the value says why that cannot be."""

    id: int


@dataclass(frozen=True, slots=True)
class TimelineRequest(Message):
    """Send the record of an earlier request, if there is one.

    Attributes:
        run: The number of that request, which ran a cell or a function.
    """

    id: int
    run: int


Request = (
    CallRequest
    | CellRequest
    | ReconnectRequest
    | PullRequest
    | ReturnRequest
    | PushRequest
    | CommitRequest
    | ShardsRequest
    | FillRequest
    | SummaryRequest
    | PartsRequest
    | DebugRequest
    | PieceRequest
    | TimelineRequest
)


@dataclass(frozen=True, slots=True)
class Addressed(Message):
    """A request of a session that is kept, and who else gets it.

    A kernel may end while it sends a request; so it counts once all have it (see ``board``).
    """

    request: Request
    ranks: tuple[int, ...]


# --- rank to kernel, on the reply socket ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameInfo(Message):
    """One frame of a traceback.

    Attributes:
        context: Lines around the failing one as (number, text); empty where no source is known.
        cycle: How many frames, up to this one, came again and again; 0 if none did.
        again: How often they came again, and are left out.
    """

    filename: str
    lineno: int
    name: str
    context: tuple[tuple[int, str], ...] = ()
    cycle: int = 0
    again: int = 0


@dataclass(frozen=True, slots=True)
class ErrorInfo(Message):
    """An exception as data, so that it arrives whatever its class does.

    Attributes:
        cause: The exception before it, and whether it was its declared cause.
        syntax: Where the code is that could not be read; its context is that line, and the marks
            below it.
    """

    ename: str
    evalue: str
    frames: tuple[FrameInfo, ...] = ()
    notes: tuple[str, ...] = ()
    cause: ErrorInfo | None = None
    cause_is_explicit: bool = False
    syntax: FrameInfo | None = None


@dataclass(frozen=True, slots=True)
class Aborted(Message):
    """A rank failed only since the process group had been given up, for the sake of another.

    Attributes:
        operation: What it waited in, or, where it is not marked as waiting, came to later; None
            where that is not known.
    """

    operation: Operation | None = None


@dataclass(frozen=True, slots=True)
class Called(Message):
    """What one rank called.

    Attributes:
        name: torch's name of the operation.
        detail: Dtype, shape, reduce op, root or peer, as text.
        place: Where in the user's code; empty if unknown.
        in_thread: In another thread than the main one.
    """

    rank: int
    name: str
    detail: str = ""
    place: str = ""
    in_thread: bool = False


@dataclass(frozen=True, slots=True)
class Mismatch(Message):
    """Ranks called different things as the same operation of a group, as far as one has seen.

    Attributes:
        group: Name of the process group; for send and receive of the pair within it.
        sequence: Which operation of the group it is, from 1.
        calls: What each rank that had come called.
        is_async: The ranks did not wait for each other before it, so some may have begun it.
        is_begun: It was seen only when it had begun, as the ranks are on different hosts.
        beside: What other threads of these ranks called at the same time, in the same group.
    """

    group: str
    sequence: int
    calls: tuple[Called, ...]
    is_async: bool = False
    is_begun: bool = False
    beside: tuple[Called, ...] = ()


@dataclass(frozen=True, slots=True)
class TimedOut(Message):
    """Ranks did not come to an operation within its time limit.

    Attributes:
        operation: What the rank that says so waited in.
        missing: Who did not come.
        limit: In seconds; 0 where that is not known.
        threads: What several threads of that rank waited in, in this group; empty if one did.
    """

    operation: Operation
    missing: tuple[int, ...]
    limit: float = 0.0
    threads: tuple[Called, ...] = ()


Reason = Aborted | Mismatch | TimedOut
"""Why a collective, send or receive broke off."""


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """The end of a request on one rank. Payload: the value, or the pickled exception, or nothing.

    Attributes:
        duration: Seconds that the user's code ran.
        reason: Why the operation broke off that the error, or one that came before it, is of.
            Without an error: what the user's code has caught.
        shown: The last expression's MIME bundle, its metadata, and a hash of what these may leave
            out; see ``fingerprint``.
        has_output: Output of this request is still on its way; an ``OutputEnd`` follows it.
        imports: Modules whose import took the user's code long, with the seconds that it took.
        own: What the user's code had raised by itself, and was handling, when that operation broke
            off. Where it could be pickled, the payload is the error and this one.
    """

    id: int
    rank: int
    duration: float = 0.0
    error: ErrorInfo | None = None
    shown: tuple[dict[str, Any], dict[str, Any], str] | None = None
    has_output: bool = False
    reason: Reason | None = None
    imports: tuple[tuple[str, float], ...] = ()
    own: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class RankReady(Message):
    """The rank is in the process group and waits for requests."""

    rank: int
    info: RankInfo


@dataclass(frozen=True, slots=True)
class RankAttached(Message):
    """The rank has connected to a kernel that has attached, and waits for its ``Resume``.

    Attributes:
        epoch: Of that kernel.
        before: Of the one that it had been connected to.
        info: As the rank last told it.
        forked_in: The generation for which its process was started.
        generation: Whose process group it is in, or was to join last.
        is_broken: That group has been given up.
        running: The request that runs.
        queued: Requests that wait.
        answered: Requests whose answers nobody has acknowledged.
    """

    rank: int
    epoch: int
    before: int
    info: RankInfo
    forked_in: int
    generation: int
    is_broken: bool
    running: Addressed | None
    queued: tuple[Addressed, ...]
    answered: tuple[Addressed, ...]


@dataclass(frozen=True, slots=True)
class RankFailed(Message):
    """The rank could not join the process group; it ends itself.

    Attributes:
        limit: The limit that it met, with what to do, where it was refused a process or thread.
    """

    rank: int
    generation: int
    error: ErrorInfo
    limit: str = ""


@dataclass(frozen=True, slots=True)
class EngineRegistered(Message):
    """The rank's ipyparallel engine is known to the controller under this id.

    Attributes:
        engine_id: Below 0 if it could not register.
        problem: Why it could not.
    """

    rank: int
    generation: int
    engine_id: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StackReply(Message):
    """Where the main thread is.

    Attributes:
        place: The innermost line of user code.
        is_device_wait: It waits for the device.
        unseen: What that may have been given that is not seen, as texts.
        instruction: A number that stays the same while it is at one call; 0 where that is made to
            wait for something else than a device.
        has_threads: The rank has ended its part of a run, but a thread that it has started goes on.
        has_one_thread: No other thread of the process has code of the user's to run.
        interrupted: What the code has made of an interrupt, such as ``"its code caught the
            interrupt at In[2] line 4"``; empty if there was none, or while it is on its way.
    """

    rank: int
    number: int
    stack: tuple[FrameInfo, ...]
    place: str
    is_device_wait: bool = False
    unseen: tuple[str, ...] = ()
    instruction: int = 0
    has_threads: bool = False
    has_one_thread: bool = False
    interrupted: str = ""


@dataclass(frozen=True, slots=True)
class CompletionReply(Message):
    """Completions, or what is known about a name.

    Attributes:
        start: Where in the code the text begins that a completion replaces.
        matches: Completions, each with its type, such as ``"function"``.
        text: About the name; empty if there is none.
    """

    rank: int
    number: int
    start: int = 0
    matches: tuple[tuple[str, str], ...] = ()
    text: str = ""


# --- rank to kernel, on the output socket ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text(Message):
    """Text that a rank wrote while a request ran (request 0: between requests).

    Attributes:
        begin: Where it begins in the log file of its stream; -1 if it found no room there.
        end: Where it ends.
    """

    rank: int
    request: int
    stream: str
    text: str
    begin: int = -1
    end: int = -1


@dataclass(frozen=True, slots=True)
class Display(Message):
    """Something that a rank displayed. ``update`` replaces the display of the same id."""

    rank: int
    request: int
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str = ""
    update: bool = False


@dataclass(frozen=True, slots=True)
class CommMessage(Message):
    """What a comm of a rank sends to the page: a widget that is made, changes, or is closed.

    Attributes:
        process: The generation for which the rank's process was started.
        kind: ``"comm_open"``, ``"comm_msg"`` or ``"comm_close"``.
        comm_id: Its own and no other's, over all ranks.
        content: Of the Jupyter message: ``data``, and of an opening the target.
    """

    rank: int
    request: int
    process: int
    kind: str
    comm_id: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ClearOutput(Message):
    """The rank called ``clear_output``."""

    rank: int
    request: int
    wait: bool


@dataclass(frozen=True, slots=True)
class InputRequest(Message):
    """A rank wants a line of input, and waits for the ``InputReply``; sent in order with its text.

    Attributes:
        number: Of the question, from 1.
        secret: What is typed is not to be seen.
    """

    rank: int
    request: int
    number: int
    prompt: str = ""
    secret: bool = False


@dataclass(frozen=True, slots=True)
class OutputEnd(Message):
    """All output of a request has been sent."""

    rank: int
    request: int


# --- what a rank does, for a diagnosis ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation(Message):
    """A collective, send or receive that a rank has begun and not ended.

    Attributes:
        name: torch's name of it, such as ``"all_reduce"`` or ``"recv"``.
        group: Name of the process group; for send and receive of the pair within it. Operations
            of the same group are matched by their sequence number.
        members: The ranks that have to take part.
        sequence: Which operation of the group it is, from 1.
        detail: Dtype, shape, reduce op, root or peer, as text.
        place: Where in the user's code, such as ``"In[3] line 4"``; empty if unknown.
        seconds: For how long.
        is_waiting: The main thread is blocked in it; otherwise it was issued asynchronously.
        in_thread: Another thread is blocked in it.
        is_enqueued: A device was given it, and has not been seen to complete it.
        device_stream: The number of the device's stream in which it runs, after whatever the rank
            has given to that stream before; 0 where that is not known.
        in_group_order: A device was given it, and the group's backend runs one operation after the
            other there, messages between two ranks too.
        is_on_cpu: Threads of a backend do it, such as gloo's, and no device.
        stream_key: Tells its group from others that had the same name.
        thread: The number of the thread that has issued it; 0 for the main thread.
    """

    name: str
    group: str
    members: tuple[int, ...]
    sequence: int
    detail: str = ""
    place: str = ""
    seconds: float = 0.0
    is_waiting: bool = True
    in_thread: bool = False
    is_enqueued: bool = False
    device_stream: int = 0
    in_group_order: bool = False
    is_on_cpu: bool = False
    stream_key: int = field(default=0, compare=False)
    thread: int = field(default=0, compare=False)

    @property
    def is_of_device(self) -> bool:
        """Whether who waits for it waits for a device."""
        return self.is_enqueued and not self.is_on_cpu


STORE_WAIT = "store_wait"
"""Name of the operation of a rank that waits for keys of the store."""
LIMITED_STORE_WAIT = "limited_store_wait"
"""The same where the caller has said for how long."""


class Left(NamedTuple):
    """That the code of a rank has left a process group.

    Attributes:
        place: In the code; empty where that is not known.
        is_final: It has destroyed the group, rather than put another one in its place.
        family: What tells the group from others that had its name: with the name it gives the
            keys of its streams.
    """

    place: str
    is_final: bool
    family: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class RankReport(Message):
    """What one rank does.

    Attributes:
        state: What it is at.
        seconds: For how long it has been in that state.
        request: Number of the request that runs; 0 if none.
        place: The line of user code that runs, such as ``"In[3] line 7"``.
        outcome: How it ended its part of the run that others still work on; for a dead rank how it
            died. None while it runs, and where it may still be given work.
        operations: What it has begun and not ended, the one it is blocked in last.
        sequences: For each group that it took part in, how many operations it has begun.
        refused: Of these, those that it has not begun after all, as they do not match: the group
            and the number of each.
        stack: Its main thread's frames, outermost first; only where they were asked for.
        is_device_wait: See :class:`StackReply`.
        unseen: See :class:`StackReply`; of a rank that runs nothing only what is under way.
        instruction: See :class:`StackReply`.
        has_one_thread: See :class:`StackReply`.
        unseen_count: How often something of that kind was begun.
        is_replaying: A graph that it has replayed is not seen to be complete, which may have
            operations of any group.
        left: The process groups that its code has left.
        has_threads: See :class:`StackReply`; only where that was asked for.
        interrupted: See :class:`StackReply`.
    """

    rank: int
    state: RankState
    seconds: float = 0.0
    request: int = 0
    place: str = ""
    outcome: Outcome | None = None
    operations: tuple[Operation, ...] = ()
    sequences: dict[str, int] = field(default_factory=dict)
    refused: tuple[tuple[str, int], ...] = ()
    stack: tuple[FrameInfo, ...] = ()
    is_device_wait: bool = False
    unseen: tuple[str, ...] = ()
    unseen_count: int = 0
    instruction: int = 0
    is_replaying: bool = False
    has_one_thread: bool = False
    left: dict[str, Left] = field(default_factory=dict)
    has_threads: bool = False
    interrupted: str = ""


# --- kernel to rank, on the control socket --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Give the process group up: free whoever waits in it, refuse it to whoever comes later.

    Attributes:
        reason: Why.
        text: What the operations then raise.
        generation: Which group; a later one is left alone. -1 gives up none.
        interrupt: A request in which KeyboardInterrupt is to be raised too; 0 for none.
        refuse: Requests that are answered with an error, unrun, if they have not begun.
        stuck: Ranks that wait for what cannot come. If it seems to, it is of a rank that was freed.
        mismatch: What does not match, if ranks of different hosts have begun something that does
            not.
        force: That request is to end, whatever its code catches.
    """

    reason: AbortReason
    text: str
    generation: int
    interrupt: int = 0
    refuse: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    mismatch: Mismatch | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Resume(Message):
    """Send again what nobody has acknowledged, and go on.

    Attributes:
        drop: Requests that are not to be begun, and whose answers are of no interest.
    """

    drop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StackRequest(Message):
    """Send a ``StackReply``."""

    number: int


@dataclass(frozen=True, slots=True)
class CompletionRequest(Message):
    """Send a ``CompletionReply`` about the rank's variables.

    Attributes:
        code: What is to be completed, up to the cursor; or the name to be inspected.
    """

    number: int
    code: str
    inspect: bool = False


@dataclass(frozen=True, slots=True)
class CommInput(Message):
    """What the page sends to a comm of a rank; handled when the rank is idle.

    Attributes:
        kind: ``"comm_msg"`` or ``"comm_close"``.
    """

    kind: str
    comm_id: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class InputReply(Message):
    """What was typed.

    Attributes:
        number: Of the question.
        text: Without the line's end; None at the end of the input.
        why: Why nobody could be asked; empty if somebody was.
    """

    number: int
    text: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class ControllerInfo(Message):
    """Connection facts of ipyparallel's controller for an engine. Never in an environment.

    Attributes:
        profile_dir: Where ipyparallel keeps files; empty on another host, which makes its own.
    """

    connection: dict[str, Any]
    profile_dir: str
