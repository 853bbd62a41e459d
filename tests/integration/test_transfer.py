"""Moving tensors between the notebook and the ranks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distsession import RunError, Session
from distsession.errors import (
    OptionsError,
    RunInterrupt,
    SerializationError,
    SessionStateError,
)
from distsession.kernel import progress
from distsession.protocol import shared_memory
from tests.backends import BACKENDS, Place, only
from tests.integration.conftest import Recorder
from tests.memory_pages import needs_pagemap
from tests.unit.test_tensors import nested, same
from tests.until import Press

LARGE = 300_000  # elements, well above what goes through the buffer
BUFFERED = 50_000  # and above what goes with a message

PLACES = [
    pytest.param(place := Place(backend, 2, nodes), id=f"{place.backend}, {nodes} nodes")
    for backend in BACKENDS
    for nodes in (1, 2)[: 1 if backend.is_device else 2]
]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    """A backend, and how many nodes this machine plays."""
    found: Place = request.param
    return found


@pytest.fixture(scope="module")
def nodes(place: Place) -> int:
    return place.nodes


@pytest.fixture(scope="module")
def _shared(place: Place) -> Iterator[tuple[Session, Recorder]]:
    recorder = Recorder()
    with place.session(output=recorder) as session:
        yield session, recorder


@pytest.fixture(scope="module")
def four(place: Place) -> Iterator[Session]:
    with place.session(4) as session:
        yield session


def segments(pid: int | str = "self") -> int:
    """Mappings of shared payloads that a process has for itself."""
    return sum(" rw-p " in line for line in mapped_segments(pid))


def mapped_segments(pid: int | str) -> list[str]:
    """What /proc says of each, of those that others see as well."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "memfd:distsession (" in line]


def settled_segments() -> int:
    """Those that this process keeps, once none is kept for the next payload any more."""
    gc.collect()
    time.sleep(shared_memory.KEEP + 0.5)
    return segments()


# --- push and pull --------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(nested, st.sampled_from([0, BUFFERED, LARGE]))
def test_what_arrives_equals_what_was_sent_on_every_rank_and_back(
    four: Session, value: Any, ballast: int
) -> None:
    if ballast:
        value = {"value": value, "ballast": torch.arange(ballast)}
    four.push(sent=value)
    back = four.pull("sent")
    assert back.ranks == (0, 1, 2, 3)
    assert back.durations == {}  # no code of the user's has run for it
    for arrived in back.values():
        assert same(arrived, value)
    (fold,) = set(four.evaluate("str(sent)").values())
    assert fold == str(value)


@pytest.mark.parametrize("size", [1, BUFFERED, LARGE])
def test_a_change_on_one_rank_changes_nothing_elsewhere(session: Session, size: int) -> None:
    here = torch.ones(size)
    session.push(x=here)
    session.execute("x += rank + 1")
    here[0] = 77.0
    back = session.pull("x")
    assert [float(back[rank][0]) for rank in (0, 1)] == [2.0, 3.0]
    back[0][0] = 5.0
    assert float(session[0].pull("x")[0][0]) == 2.0


def test_what_waits_to_be_taken_is_not_written_over_by_what_is_sent_meanwhile(
    session: Session,
) -> None:
    def total(value: torch.Tensor) -> float:
        return float(value.sum())

    session.execute("import time")
    held = [session.submit(lambda: time.sleep(0.3))]
    sums = [session.submit(total, torch.full((BUFFERED,), float(n))) for n in range(30)]
    for number, found in enumerate(sums):
        assert set(found.result(60).values()) == {float(BUFFERED * number)}
    held[0].result(60)
    for number in range(30):
        session.push(x=torch.full((BUFFERED,), float(number)))
        assert set(session.run(total, torch.zeros(BUFFERED)).values()) == {0.0}
        assert set(session.evaluate("float(x.sum())").values()) == {float(BUFFERED * number)}


@needs_pagemap
def test_memory_that_ranks_have_done_with_is_written_to_again(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(2)
    monkeypatch.setattr(shared_memory, "KEEP", 60.0)
    session.execute("import distsession.engine.mappings; distsession.engine.mappings.KEEP = 60.0")
    files = set()
    for number in range(30):
        session.push(x=torch.full((LARGE,), float(number)))
        assert set(session.evaluate("float(x.sum())").values()) == {float(LARGE * number)}
        files |= {line.split()[4] for line in mapped_segments(session.infos[0].pid)}
    assert len(files) <= shared_memory.KEPT


def test_what_ranks_hold_stays_as_it_was_whatever_is_sent_later(session: Session) -> None:
    session.execute(
        """
        import os
        held, children = [], []

        def hold(x, number):
            held.append((number, x if number % 3 else x.numpy()[:5] if number % 2 else x[7:9]))
            if number % 4 == 1:  # what a child has it keeps, though it is gone here
                ours, its = os.pipe(), os.pipe()
                pid = os.fork()
                if not pid:
                    os.read(its[0], 1)
                    os._exit(bool((x != number).any()))
                os.close(its[0])
                children.append((pid, its[1]))
                held.pop()
        """
    )
    for number in range(24):
        value = torch.full((LARGE,), float(number))
        session.push(x=value)
        session.execute(f"hold(x, {number})")
        session.push(x=value)
        session.execute("x += 1")  # only its own
    wrong = session.evaluate(
        "[number for number, value in held if any(float(v) != number for v in value.flatten()[:5])]"
    )
    assert set(map(tuple, wrong.values())) == {()}
    ended = session.evaluate(
        "[(os.write(end, b'x'), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))[1] "
        "for pid, end in children]"
    )
    assert set(map(tuple, ended.values())) == {(0,) * 6}
    session.execute("del held, children, x")


def test_names_are_set_by_keyword_and_by_dict_and_on_some_ranks(session: Session) -> None:
    session.push({"a": 1, "self": 2}, b=3)
    assert session.pull("a", "self", "b")[1] == {"a": 1, "self": 2, "b": 3}
    session[1].push(a=10)
    assert dict(session.pull("a")) == {0: 1, 1: 10}


def test_parts_are_pulled_by_their_path(session: Session) -> None:
    session.execute("model = torch.nn.Linear(2, 2); losses = [1.5, 2.5]; by = {'k': {-1: 4}}")
    weight = session.pull("model.weight")
    assert isinstance(weight[0], torch.nn.Parameter)
    assert session.pull("losses[-1]").values()
    assert list(session.pull("losses[-1]").values()) == [2.5, 2.5]
    assert session.pull("by['k'][-1]")[0] == 4


def test_what_values_share_is_shared_there(session: Session) -> None:
    model = torch.nn.Linear(300, 300)
    session.push(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    session.execute(
        "model(torch.ones(1, 300, device='cpu')).sum().backward(); before = model.weight.clone(); "
        "optimizer.step(); moved = (before - model.weight).abs().min().item()"
    )
    assert session.pull("moved")[0] == pytest.approx(0.5)


def test_arguments_and_results_take_the_same_road(session: Session, nodes: int) -> None:
    x = torch.arange(LARGE)

    def double(t: torch.Tensor) -> torch.Tensor:
        with open("/proc/self/maps") as maps:
            assert "memfd:distsession (" in maps.read()
        return t * 2

    before = settled_segments()
    results = session.run(double, x)
    assert torch.equal(results[1], x * 2)
    # What comes from elsewhere is in memory of its own.
    assert segments() == before + 2 // nodes
    del results
    gc.collect()
    assert segments() == before


@pytest.mark.parametrize("size", [3, LARGE, 40 * LARGE], ids=["small", "large", "in pieces"])
def test_what_ranks_compute_is_pulled_once_it_is_there(session: Session, size: int) -> None:
    """On a device it is only begun when the pull asks for it."""
    session.execute(
        f"x = torch.zeros({size}, dtype=torch.int32)\n"
        "for _ in range(20): x += rank + 1\n"
        "both = {'x': x, 'views': [x[1:], x[:1]], 'parameter': torch.nn.Parameter(x.float()[:2])}"
    )
    for rank, both in session.pull("both").items():
        assert both["x"].device.type == "cpu"
        assert both["x"].shape == (size,)
        assert (both["x"] == 20 * (rank + 1)).all()
        assert both["views"][0].data_ptr() == both["x"][1:].data_ptr()
        assert both["parameter"].tolist() == [20.0 * (rank + 1)] * 2
        assert both["parameter"].requires_grad
    sums = session.run(torch.sum, both["x"])
    assert [int(total) for total in sums.values()] == [40 * size] * 2


@only("device", "the CPU's memory is counted by shared segments")
def test_what_was_pulled_and_pushed_holds_no_memory_of_the_device(session: Session) -> None:
    held = "torch.accelerator.memory_allocated()"
    session.execute("x = torch.ones(3_000_000)")
    before = dict(session.evaluate(held))
    for _ in range(3):
        back = session.pull("x")
        session.push(y=back[0])
        session.run(torch.sum, back[1])
    assert dict(session.evaluate("y.device.type")) == {0: "cpu", 1: "cpu"}
    assert dict(session.evaluate(held)) == before


def test_numpy_arrays_and_tables_travel_too(session: Session) -> None:
    frame = pandas.DataFrame({"a": np.arange(LARGE), "b": np.ones(LARGE), "c": ["x"] * LARGE})
    table = pyarrow.table({"n": list(range(1000))})
    arrays = [np.arange(LARGE), np.arange(12).reshape(3, 4)[:, ::2], np.array(["a", None])]
    session.push(frame=frame, table=table, arrays=arrays)
    assert session.pull("frame")[1].equals(frame)
    assert session.pull("table")[0].equals(table)
    for arrived, sent in zip(session.pull("arrays")[1], arrays, strict=True):
        np.testing.assert_array_equal(arrived, sent)
    arrived = session.pull("arrays")[0][0]
    arrived += 1
    assert arrived[0] == 1


def test_memory_is_given_back_with_the_last_holder(session: Session) -> None:
    def held() -> tuple[list[int], int, int, list[int]]:
        opened = len(os.listdir("/proc/self/fd"))
        pids = [info.pid for info in session.infos]
        every = [len(mapped_segments(pid)) for pid in ("self", *pids)]  # shared ones, too
        return [segments(pid) for pid in pids], segments(), opened, every

    session.execute("import gc; gc.collect()")
    settled_segments()
    before = held()
    session.push(held=torch.zeros(LARGE))
    back = session.pull("held")
    assert held()[0] == [count + 1 for count in before[0]]
    del back
    session.execute("del held")
    gc.collect()
    deadline = time.monotonic() + 5  # all keep it for another payload, for a moment
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert held() == before


@pytest.mark.alone  # other tests use shared memory, too
def test_a_killed_rank_leaves_nothing(start: Callable[..., Session]) -> None:
    def shared_kb() -> int:
        with open("/proc/meminfo") as meminfo:
            return next(int(line.split()[1]) for line in meminfo if line.startswith("Shmem:"))

    session = start(2)
    before = shared_kb()
    session.push(x=torch.zeros(25_000_000))
    assert shared_kb() > before + 90_000
    for info in session.infos:
        os.kill(info.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while shared_kb() > before + 30_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared_kb() < before + 30_000
    session.restart()
    session.push(x=torch.ones(LARGE))
    assert session.pull("x")[1].sum() == LARGE


def test_the_kernel_holds_one_copy_of_what_it_sends() -> None:
    code = """
import resource, torch
from distsession import Session
x = torch.ones(50_000_000)
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
with Session(2) as session:
    session.push(y=torch.ones(100_000))
    session.pull("y")
    before = anonymous()
    session.push(x=x)
    results = session.pull("x")
    print((anonymous() - before) // 1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(done.stdout) < 20  # of 200 MB


# --- scatter and gather ---------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    data=st.data(),
    is_array=st.booleans(),
)
def test_what_is_scattered_is_gathered_again(
    four: Session, shape: list[int], data: st.DataObject, is_array: bool
) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    whole: Any = torch.arange(int(np.prod(shape))).reshape(shape)
    whole = whole.numpy() if is_array else whole
    four.scatter("part", whole, dim)
    parts = four.pull("part")
    sizes = [part.shape[dim] for part in parts.values()]
    assert sum(sizes) == shape[dim]
    assert max(sizes) - min(sizes) <= 1
    back = four.gather("part", dim)
    assert type(back) is type(whole)
    assert back.dtype == whole.dtype
    assert back.tolist() == whole.tolist()
    assert back.shape == whole.shape


def test_a_large_tensor_is_scattered_and_gathered(four: Session) -> None:
    whole = torch.randn(1001, 503, dtype=torch.float64)
    for dim in (0, 1):
        four.scatter("part", whole, dim=dim)
        assert torch.equal(four.gather("part", dim=dim), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_any_dtype_is_gathered(session: Session, dtype: torch.dtype) -> None:
    whole = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    session.scatter("part", whole)
    back = session.gather("part")
    assert back.dtype == dtype
    assert back.float().tolist() == [0.0, 1.0, 1.0]


def test_sizes_can_be_given(four: Session) -> None:
    four.scatter("part", torch.arange(6), sizes=[0, 1, 5, 0])
    assert [len(part) for part in four.pull("part").values()] == [0, 1, 5, 0]
    assert four.gather("part").tolist() == [0, 1, 2, 3, 4, 5]


def test_lists_are_scattered_and_gathered(four: Session) -> None:
    four.scatter("names", ["a", "b", "c", "d", "e"])
    assert four.pull("names")[0] == ["a", "b"]
    assert four.gather("names") == ["a", "b", "c", "d", "e"]


def test_a_parameter_is_gathered_without_its_gradient(session: Session) -> None:
    session.execute("model = torch.nn.Linear(2, 2).requires_grad_()")
    back = session.gather("model.weight")
    assert back.shape == (4, 2)
    assert not back.requires_grad


SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
whole = torch.arange(35.).reshape(7, 5)
flat = init_device_mesh(device.type, (4,))
square = init_device_mesh(device.type, (2, 2), mesh_dim_names=("a", "b"))
rows = distribute_tensor(whole, flat, [Shard(0)])
columns = distribute_tensor(whole, flat, [Shard(1)])
copies = distribute_tensor(whole, flat, [Replicate()])
both = distribute_tensor(whole, square, [Shard(0), Shard(1)])
hybrid = distribute_tensor(whole, square, [Replicate(), Shard(0)])
twice = distribute_tensor(whole, square, [Shard(0), Shard(0)])
sums = DTensor.from_local(whole / 4, flat, [Partial()])
"""


def test_a_sharded_tensor_is_gathered_in_full(four: Session) -> None:
    four.execute(SHARDED)
    whole = torch.arange(35.0).reshape(7, 5)
    for name in ("rows", "columns", "copies", "both", "hybrid", "twice", "sums"):
        back = four.gather(name)
        assert type(back) is torch.Tensor
        assert torch.equal(back, whole), name


def test_the_parameters_of_a_sharded_model_are_gathered(four: Session) -> None:
    four.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(10, 9)\n"
        "reference = model.weight.detach().clone()\n"
        "fully_shard(model)"
    )
    assert torch.equal(four.gather("model.weight"), four.pull("reference")[0])
    # Nobody has ever had more than its part: 3 of 9 rows at most.
    assert max(four.evaluate("len(model.weight.to_local())").values()) == 3


def test_a_sharded_tensor_needs_all_ranks_of_its_mesh(four: Session) -> None:
    four.execute(SHARDED)
    with pytest.raises(SessionStateError, match=r"ranks 0-1 hold 20 of its 35 elements"):
        four[:2].gather("rows")


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_name_that_is_not_there_is_said_with_the_ranks(session: Session) -> None:
    session[0].push(only_there=1)
    said = r"NameError on rank 1( \(node1\))?: name 'only_there' is not defined"
    with pytest.raises(RunError, match=said):
        session.pull("only_there")
    with pytest.raises(RunError, match=r"on ranks 0-1( .*)?: name 'nowhere' is not"):
        session.gather("nowhere")


@pytest.mark.parametrize("name", ["1 + 1", "f()", "x; y", "import os", "", "a[b]"])
def test_pull_computes_nothing(session: Session, name: str) -> None:
    session.execute("a = b = f = 1")
    with pytest.raises(RunError, match=r"is no name of a variable"):
        session.pull(name)


@pytest.mark.parametrize("names", [{"a.b": 1}, {"1a": 1}, {3: 1}])
def test_push_takes_names_of_variables(session: Session, names: Any) -> None:
    with pytest.raises(OptionsError, match=r"is no name of one"):
        session.push(names)


def test_what_cannot_be_pickled_is_named_by_its_path_and_nothing_changes(session: Session) -> None:
    session.push(a=1, cfg=1)
    with pytest.raises(SerializationError, match=r"^cfg\['hooks'\]\[2\] cannot be sent: a _thread"):
        session.push(a=2, cfg={"hooks": [1, 2, threading.Lock()]})
    assert session.pull("a", "cfg")[0] == {"a": 1, "cfg": 1}


def test_what_one_rank_cannot_rebuild_changes_nothing_on_any(session: Session) -> None:
    class Fragile:
        def __reduce__(self) -> Any:
            return _on_rank_zero_only, ()

    session.push(a=1)
    with pytest.raises(RunError, match=r"what was pushed cannot be rebuilt: RuntimeError: not on"):
        session.push(a=Fragile(), other=2)
    assert session.pull("a").values()
    assert dict(session.pull("a")) == {0: 1, 1: 1}
    assert session.evaluate("'other' in globals()")[0] is False


def test_what_a_rank_cannot_pickle_is_an_error_of_that_rank(session: Session) -> None:
    session.execute("import threading; held = [1, threading.Lock()] if rank else [1]")
    with pytest.raises(RunError, match=r"on rank 1.*cannot be sent") as caught:
        session.pull("held")
    assert caught.value.results[0] == [1]


@pytest.mark.parametrize(
    ("value", "dim", "message"),
    [
        (torch.ones(3), 1, r"it has 1 dimensions, of shape \[3\]"),
        (torch.tensor(3.0), 0, r"it has 0 dimensions"),
        ([1, 2], 1, r"a list has dimension 0 alone"),
        ({"a": 1}, 0, r"splits a tensor, a numpy array, a list or a tuple, not a dict"),
    ],
)
def test_what_cannot_be_split_is_refused(
    session: Session, value: Any, dim: int, message: str
) -> None:
    with pytest.raises(OptionsError, match=message):
        session.scatter("x", value, dim)


def test_sizes_that_do_not_fit_are_refused(session: Session) -> None:
    with pytest.raises(OptionsError, match=r"sizes=\[1, 1\] gives 2 to 2 ranks, and there are 2"):
        session.scatter("x", torch.ones(3), sizes=[1, 1])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = torch.ones(rank + 1, rank + 1)", r"only the sizes along dim 0 may differ \(rank 0"),
        ("x = torch.ones(2).to([torch.int8, torch.int16][rank])", r"the dtypes differ"),
        ("x = torch.ones(2) if rank else [1]", r"the ranks hold different things"),
        ("x = {'a': 1}", r"joins tensors, numpy arrays or lists, not what the ranks hold \(a dict"),
        ("x = torch.ones(3, device='cpu').to_sparse()", r"quantized, nested or sparse"),
    ],
)
def test_what_does_not_fit_together_is_not_joined(
    session: Session, code: str, message: str
) -> None:
    session.execute(code)
    with pytest.raises(SessionStateError, match=message):
        session.gather("x")


def test_a_dimension_that_is_not_there_is_refused(session: Session) -> None:
    session.push(x=torch.ones(2))
    with pytest.raises(OptionsError, match=r"gather\('x', dim=1\): on rank 0 it has 1 dimensions"):
        session.gather("x", dim=1)


def test_a_payload_beyond_all_memory_is_refused_and_nothing_changes(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.push(x=1)
    monkeypatch.setattr(shared_memory, "ASK_MEMORY", 1000)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 1000)
    with pytest.raises(SerializationError, match=r"only 1 kB of memory are free"):
        session.push(x=torch.ones(LARGE))
    assert session.pull("x")[0] == 1


def test_without_shared_memory_everything_works_all_the_same(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "offer", lambda *_, **__: None)
    session.execute(
        "from distsession.protocol import shared_memory; shared_memory.offer = lambda *_: None"
    )
    try:
        x = torch.arange(LARGE)
        assert settled_segments() == 0
        before = mapped_segments("self")
        session.push(x=x)
        back = session.pull("x")[1]
        assert segments() == 0
        assert set(mapped_segments("self")) <= set(before)  # nor was anything sent through one
        assert torch.equal(back, x)
        back += 1
    finally:
        session.restart()


def test_a_stop_before_anything_is_sent_leaves_the_names(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.push(x=1)

    class Impatient(progress.TransferProgress):
        def __call__(self, *_: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("distsession.kernel.requests.TransferProgress", Impatient)
    with pytest.raises(RunInterrupt, match="nothing was sent"):
        session.push(x=torch.ones(LARGE))
    assert session.pull("x")[1] == 1


def test_a_stop_while_ranks_answer_leaves_the_session_usable(session: Session) -> None:
    session.execute(
        "import time\nclass Slow:\n    def __reduce__(self):\n        time.sleep(30)\nslow = Slow()"
    )
    with Press(session, lambda: signal.raise_signal(signal.SIGINT)) as pressed:
        with pytest.raises(RunInterrupt):
            session.pull("slow")
        assert time.monotonic() - pressed.pressed_at < 20
    session.push(x=3)
    assert session.pull("x")[0] == 3


def test_a_long_transfer_shows_how_far_it_is(
    session: Session, nodes: int, output: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "SHOW_TRANSFER_EVERY_S", 0.0)
    monkeypatch.setattr(shared_memory, "CHUNK", 1 << 20)
    monkeypatch.setattr(shared_memory, "COPIED", 1 << 20)
    session.push(x=torch.ones(LARGE * 10))
    shown = [text for text in output.notices if text.startswith("sending")]
    assert len(shown) > 5
    whole = 12 * nodes
    assert f"[########################] {whole} of {whole} MB" in shown[-1]


def test_a_session_in_this_process_moves_tensors_too(start: Callable[..., Session]) -> None:
    session = start(launcher="inline")
    x = torch.arange(12.0).reshape(3, 4)
    session.push(x=x, cfg={"a": [x]})
    session.execute("x += 1")
    assert x[0, 0] == 0
    assert session.pull("x")[0][0, 0] == 1
    session.scatter("y", x, dim=1)
    assert torch.equal(session.gather("y", dim=1), x)
    with pytest.raises(RunError, match="NameError"):
        session.pull("z")


def _on_rank_zero_only() -> int:
    if os.environ.get("RANK") != "0":
        raise RuntimeError("not on this rank")
    return 5


CANNOT_BE_PULLED = {
    "DDP": (
        "bad = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))]",
        "bad[0] cannot be sent: a torch.nn.parallel.distributed.DistributedDataParallel: its "
        "process group lives on its rank alone. session.pull('bad[0].module') brings the module "
        "within, session.evaluate('bad[0].module.state_dict()') its weights.",
    ),
    "FSDP2": (
        "from torch.distributed.fsdp import fully_shard\n"
        "bad = fully_shard(torch.nn.Linear(2, 2), "
        "mesh=dist.init_device_mesh(device.type, (2,)))",
        "FSDPLinear: each rank has a part of its weights, and its process group. "
        "get_model_state_dict(bad, options=",
    ),
    "a group": ("bad = dist.group.WORLD", "dist.get_process_group_ranks(bad) gives its ranks."),
    "a work": ("bad = dist.barrier(async_op=True)", "Wait for it there with bad.wait()"),
    "a store": ("bad = dist.HashStore()", "bad.get(KEY) gives what a key has."),
    "a generator": ("bad = (n for n in ())", "list(bad) gives its values"),
    "an iterator": (
        "bad = iter(torch.utils.data.DataLoader([1]))", "Pull the DataLoader, or next(bad)."
    ),
    "a lock": ("import threading\nbad = threading.Lock()", "cannot pickle '_thread.lock' object"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "text"), CANNOT_BE_PULLED.values(), ids=CANNOT_BE_PULLED)
def test_what_cannot_be_pulled_is_told_once_with_what_can(
    session: Session, code: str, text: str
) -> None:
    session.execute(f"good = 1\n{code}")
    with pytest.raises(RunError) as caught:
        session.pull("good", "bad")
    shown = caught.value._render_traceback_()
    assert len(shown) == 1, shown
    assert shown[0].startswith("SerializationError on ranks 0-1 (")
    assert text in shown[0]
    assert isinstance(caught.value.first, SerializationError)
    session.execute("del bad")


def test_a_value_that_is_no_variable_is_told_alike(session: Session) -> None:
    with pytest.raises(RunError, match=r"ranks 0-1.*: the result .* VALUE.module, the module"):
        session.evaluate("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    with pytest.raises(RunError, match=r"ranks 0-1.*: the result cannot be rebuilt"):
        session.execute(
            "class Odd:\n    def __reduce__(self): return int, ('x',)\nOdd()", fetch=True
        )
    weights = session.evaluate(
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)).module.state_dict()"
    )
    assert list(weights[1]) == ["weight", "bias"]
