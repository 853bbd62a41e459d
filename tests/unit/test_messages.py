"""Messages on the wire."""

from __future__ import annotations

import dataclasses
import pickle
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.protocol import agent_messages, messages
from distsession.protocol.agent_messages import (
    AgentFailed,
    AgentReady,
    AgentStarted,
    GpuHolder,
    GpuMemory,
    GpuReply,
    GpuRequest,
    LogPiece,
    LogRequest,
    PreloadReply,
    PreloadRequest,
    PrepareAgent,
    RankExited,
    RankUsage,
    StartRanks,
    StopRanks,
    StoreEnded,
    StoreReady,
    UsageReply,
    UsageRequest,
)
from distsession.protocol.messages import (
    MAGIC,
    Abort,
    Aborted,
    Addressed,
    Buffered,
    Called,
    CallRequest,
    CellRequest,
    ClearOutput,
    CommInput,
    CommitRequest,
    CommMessage,
    CompletionReply,
    CompletionRequest,
    ControllerInfo,
    DebugRequest,
    Display,
    EngineRegistered,
    ErrorInfo,
    FillRequest,
    FrameInfo,
    InputReply,
    InputRequest,
    MalformedMessage,
    Mismatch,
    Operation,
    OutputEnd,
    PartsRequest,
    PieceRequest,
    PullRequest,
    PushRequest,
    RankAttached,
    RankFailed,
    RankReady,
    RankReport,
    ReconnectRequest,
    Reply,
    Resume,
    ReturnRequest,
    ShardsRequest,
    Shared,
    StackReply,
    StackRequest,
    SummaryRequest,
    Text,
    TimedOut,
    TimelineRequest,
    decode,
    encode,
)
from distsession.protocol.rank_state import AbortReason
from distsession.ranks import DeviceInfo, HostInfo, RankInfo

FRAME = FrameInfo("In[3]", 2, "step", ((1, "def step():"), (2, "    1 / 0")))
ERROR = ErrorInfo("ZeroDivisionError", "division by zero", (FRAME,), ("a note",))
INFO = RankInfo(1, 1, 2, 2, 0, 1, "alpha", 77, "gloo", DeviceInfo("cpu", "a processor"))
HOST = HostInfo("alpha", 76, ("GPU 0",), (("gloo", ("cpu", "cuda")),), "2.9.0", 8)
START = StartRanks(
    ranks=(0, 1),
    world_size=2,
    generation=1,
    devices=("cpu", "cpu"),
    backend="gloo",
    timeout=None,
    seed=3,
    seed_per_rank=True,
    threads=2,
    check="shared",
    board=5,
    folder="/tmp/x",
    cwd="/home",
    sys_path=("", "/lib"),
    environ={"TOKEN": "secret"},
)
EXAMPLES: list[Any] = [
    AgentFailed("no such module"),
    UsageRequest(4, {0: "GPU-1"}),
    LogRequest(4, 2, 1, "out", 1 << 40, 1000, 1),
    LogPiece(4, 1, 1 << 41, 1 << 40, b"text"),
    GpuRequest(1),
    GpuReply(1, (GpuMemory(0, "GPU-1", "A GPU", 1 << 30, 1 << 36, (GpuHolder(7, "al", 9),)),)),
    GpuMemory(0, "GPU-1", "A GPU", 1 << 30, 1 << 36),
    GpuHolder(7, "", -1),
    UsageReply(4, (RankUsage(0, 77, 12.5, 1.5, 1 << 28, 1 << 33, 1 << 36, 97),)),
    RankUsage(1, 78, 12.6, 0.5, 1 << 20),
    InputRequest(1, 2, 3, "(Pdb) ", secret=False),
    InputReply(3, None, "nobody is there"),
    DebugRequest(4),
    CompletionRequest(4, "model.", inspect=False),
    CompletionReply(1, 4, 6, (("fc", "instance"),), "Type: int"),
    StackRequest(4),
    CommitRequest(4, keep=True),
    FillRequest(4, "x", (4, 3), {0: (0, 0), 1: (2, 0)}),
    PartsRequest(4, ("['a']", "")),
    PullRequest(4, ("model", "optim"), lend=True, for_ranks=True),
    ReturnRequest(5),
    SummaryRequest(4, "model", "In[4]"),
    Buffered(2, 64, (100_000, 17)),
    Shared("0.1", 3, (10, 2000)),
    ShardsRequest(4, "x"),
    Operation("all_reduce", "world", (0, 1), 3, "float32 [4], sum", "In[2] line 1", 1.5),
    PushRequest(5, by_word=True),
    RankReport(0, "running", 2.0, 7, "In[2] line 1", sequences={"world": 3}, stack=(FRAME,)),
    StackReply(1, 4, (FRAME,), "In[3] line 2"),
    AgentStarted(1),
    AgentReady(HOST, 1),
    PieceRequest(4, (0, 2), (1, 3)),
    StoreEnded(77, -9, False, True),
    StoreReady(4711),
    CallRequest(1, "train"),
    CellRequest(2, "x = 1\n", "In[2]", fetch=True, expression=False),
    CommMessage(1, 7, 3, "comm_msg", "ab", {"data": {"state": {"value": 4}}}, {}, (b"\0\1",)),
    CommInput("comm_msg", "ab", {"method": "update", "state": {"value": 5}}, {}, (b"x",)),
    ClearOutput(0, 2, wait=True),
    ControllerInfo({"key": "k", "ports": [1, 2]}, "/tmp/profile"),
    Display(0, 2, {"image/png": b"\x89", "text/plain": "x"}, {"image/png": {"width": 3}}, "id"),
    EngineRegistered(1, 0, 4),
    dataclasses.replace(ERROR, cause=ERROR, cause_is_explicit=True),
    FRAME,
    Abort(AbortReason.STOP, "stopped", 3, interrupt=9, refuse=(10, 11), stuck=(0, 2)),
    OutputEnd(0, 2),
    PreloadReply(7, 1, "it does not import", ("json",)),
    PreloadRequest(7, ("json", "torch.onnx"), ("/lib",), is_trial=True),
    PrepareAgent(("json",), ("/lib",)),
    RankExited(1, 0, 77, -9, False, "last words"),
    RankFailed(1, 0, ERROR),
    RankReady(1, INFO),
    ReconnectRequest(3, 2, 12.5),
    Reply(1, 0, 0.25, ERROR, ({"text/plain": "3"}, {}), has_output=True),
    Aborted(Operation("barrier", "world", (0, 1), 3)),
    Called(1, "all_reduce", "float32 [4], sum", "In[2] line 1"),
    Mismatch("world", 3, (Called(0, "barrier"), Called(1, "all_reduce", "float32 [4], sum"))),
    TimedOut(Operation("barrier", "world", (0, 1), 3), (1,), 30.0),
    START,
    StopRanks((0, 1)),
    Addressed(CellRequest(3, "x", "In[1]"), (0, 1)),
    RankAttached(1, 2, 1, INFO, 0, 3, False, None, (), ()),
    Resume((3,)),
    TimelineRequest(5, 4),
    Text(0, 2, "stdout", "naïve \udc80 text\n"),
]


def test_every_message_has_an_example_here() -> None:
    public = [getattr(home, name) for home in (messages, agent_messages) for name in home.__all__]
    classes = {cls for cls in public if dataclasses.is_dataclass(cls)}
    assert {type(example) for example in EXAMPLES} == classes


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_left(message: Any) -> None:
    arrived, payload = decode([bytes(frame) for frame in encode(message)])
    assert arrived == message
    assert type(arrived) is type(message)
    assert list(payload) == []


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_cannot_be_changed(message: Any) -> None:
    name = dataclasses.fields(message)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(message, name, None)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_a_payload_arrives_frame_by_frame(payload: list[bytes]) -> None:
    message, arrived = decode(encode(CallRequest(1, "f"), payload))
    assert message == CallRequest(1, "f")
    assert list(arrived) == payload


def test_a_message_can_say_where_its_payload_is() -> None:
    shared = Shared("0.1", 3, (10, 2000))
    assert decode(encode(CallRequest(1, "f"), shared)) == (CallRequest(1, "f"), shared)


@given(st.text(), st.integers(0, 2**40), st.text())
def test_any_text_of_a_rank_arrives(stream: str, request: int, text: str) -> None:
    message = Text(3, request, stream, text)
    assert decode(encode(message))[0] == message


def test_a_node_has_a_block_of_ranks() -> None:
    assert START.here == range(2)
    second = dataclasses.replace(
        START, node=1, nodes=2, first_rank=4, devices=("cpu",) * 3, host="gpu2"
    )
    assert second.here == range(4, 7)


def test_the_environment_stays_out_of_what_is_printed() -> None:
    assert "secret" not in repr(START)


# --- what is no message ---------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=12), max_size=4))
def test_garbage_is_malformed_and_nothing_else(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        decode(frames)


@given(st.binary(max_size=12))
def test_garbage_behind_our_mark_is_malformed_and_nothing_else(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode([MAGIC + frame])


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_message_that_was_cut_short_is_malformed(message: Any, data: st.DataObject) -> None:
    (frame,) = encode(message)
    length = data.draw(st.integers(len(MAGIC), len(frame) - 1))
    with pytest.raises(MalformedMessage, match="does not unpickle"):
        decode([frame[:length]])


@pytest.mark.parametrize("foreign", [3, "text", {"id": 1}, date(2024, 1, 1), INFO, CallRequest])
def test_a_pickle_of_something_else_is_refused(foreign: object) -> None:
    with pytest.raises(MalformedMessage, match=f"a {type(foreign).__name__} where a message"):
        decode([MAGIC + pickle.dumps((foreign, ()))])


def test_a_message_without_our_mark_is_refused() -> None:
    (frame,) = encode(Abort(AbortReason.STOP, "", 1))
    body = frame[len(MAGIC) :]
    for frames in ([], [b""], [body], [b"ds0" + body], [body, MAGIC]):
        with pytest.raises(MalformedMessage, match="without our mark"):
            decode(frames)


def test_malformed_is_a_value_error() -> None:
    assert issubclass(MalformedMessage, ValueError)
