"""Tensors through a pickle and back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distsession.engine.tensors import Tensors, over
from distsession.protocol import serialize

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _reducer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialize, "_make_reducer", Tensors)


def frames_of(value: Any) -> list[Any]:
    return serialize.dump_value(value, what="the value")


def there(value: Any) -> Any:
    """The value as it arrives in another process."""
    return serialize.load([bytearray(frame) for frame in frames_of(value)])


def sent(value: Any) -> int:
    """Bytes that lie beside the pickle."""
    return sum(memoryview(frame).nbytes for frame in frames_of(value)[1:])


def raw(tensor: torch.Tensor) -> bytes:
    """Its elements as bytes, so that NaN and float8 can be compared."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach())
    return bytes(flat.view(torch.uint8).tolist())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    size = torch.empty(0, dtype=dtype).element_size()
    count = size
    for n in shape:
        count *= n
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.tensor(list(data), dtype=torch.uint8)
    tensor = (flat.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        tensor = tensor[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
    return tensor


nested = st.recursive(
    tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


def same(there: Any, here: Any) -> bool:
    if isinstance(here, torch.Tensor):
        assert there.dtype == here.dtype
        assert there.shape == here.shape
        return raw(there) == raw(here)
    if isinstance(here, dict):
        return list(here) == list(there) and all(same(there[key], here[key]) for key in here)
    return len(here) == len(there) and all(map(same, there, here))


@settings(max_examples=300, deadline=None)
@given(nested)
def test_what_arrives_equals_what_was_sent(value: Any) -> None:
    assert same(there(value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_lies_beside_the_pickle_and_not_in_it(dtype: torch.dtype) -> None:
    tensor = torch.zeros(10_000, dtype=dtype)
    head, *_ = frames_of([tensor])
    assert len(head) < 500


def test_a_tensor_is_sent_from_where_it_lies() -> None:
    tensor = torch.zeros(1000)
    frames = frames_of(tensor)
    tensor[0] = 3.0
    assert serialize.load([bytearray(frame) for frame in frames])[0] == 3.0


def test_a_tensor_that_arrived_can_be_changed() -> None:
    arrived = there(torch.zeros(100_000))
    arrived += 1
    assert arrived.sum() == 100_000


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x.permute(1, 0), lambda x: x[:1].expand(5, 6), lambda x: x[2:4]],
    ids=["transposed", "permuted", "expanded", "rows"],
)
def test_strides_are_kept(view: Any) -> None:
    here = view(torch.arange(24.0).reshape(4, 6))
    assert there(here).stride() == here.stride()
    assert torch.equal(there(here), here)


def test_a_view_does_not_drag_its_storage_along() -> None:
    big = torch.zeros(1000, 1000)
    assert sent(big[3]) < 4100
    assert sent([big[3], big[900]]) < 8200


def test_a_view_with_gaps_arrives_contiguous() -> None:
    big = torch.arange(1e6).reshape(1000, 1000)
    arrived = there(big[:, 7])
    assert sent(big[:, 7]) < 4100
    assert arrived.is_contiguous()
    assert torch.equal(arrived, big[:, 7])


@pytest.mark.parametrize("order", ["base first", "view first"])
def test_tensors_that_share_memory_share_it_there(order: str) -> None:
    base = torch.zeros(100, 100)
    pair = [base, base[:, 3]]
    if order == "view first":
        pair.reverse()
    base, column = sorted(there(pair), key=lambda tensor: -tensor.dim())
    column.fill_(5.0)
    assert base.sum() == 500
    assert sent(pair) < 41_000


def test_views_of_different_dtypes_share_memory() -> None:
    words = torch.zeros(8, dtype=torch.int32)
    raw_bytes = words.view(torch.uint8)[1:]
    arrived_bytes, arrived_words = there([raw_bytes, words])
    arrived_bytes[3] = 7
    assert arrived_words.tolist() == [0, 7, 0, 0, 0, 0, 0, 0]


def test_a_tied_weight_stays_tied() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.second = torch.nn.Linear(8, 8)
            self.second.weight = self.first.weight

    arrived = there(Tied())
    assert arrived.first.weight is arrived.second.weight
    assert isinstance(arrived.first.weight, torch.nn.Parameter)


def test_an_optimizer_keeps_hold_of_its_models_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    arrived, its_optimizer = there((model, optimizer))
    assert its_optimizer.param_groups[0]["params"][0] is arrived.weight
    state = its_optimizer.state[arrived.weight]
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"])


@dataclass
class Batch:
    inputs: torch.Tensor
    extras: dict[str, list[torch.Tensor]]


def test_tensors_are_found_wherever_they_are() -> None:
    batch = Batch(torch.ones(3), {"a": [torch.zeros(2), torch.eye(2)]})
    arrived = there(batch)
    assert torch.equal(arrived.inputs, batch.inputs)
    assert torch.equal(arrived.extras["a"][1], torch.eye(2))


def test_an_empty_tensor_arrives_on_the_cpu_whatever_the_default_device_is() -> None:
    sent = torch.ones(0, 3)
    with torch.device("meta"):
        arrived = there(sent)
        joined = over(b"", torch.float32, (0, 3))
    assert (arrived.device.type, arrived.shape) == ("cpu", (0, 3))
    assert (joined.device.type, joined.shape) == ("cpu", (0, 3))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_whether_a_gradient_is_wanted_is_kept(requires_grad: bool) -> None:
    leaf = torch.ones(2, requires_grad=requires_grad)
    assert there(leaf).requires_grad is requires_grad
    assert there(leaf * 2).requires_grad is requires_grad
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=requires_grad)
    assert there(parameter).requires_grad is requires_grad
    assert type(there(parameter)) is torch.nn.Parameter


def test_attributes_of_a_tensor_are_kept() -> None:
    tensor = torch.ones(2)
    tensor.name_of_it = "weights"
    assert there(tensor).name_of_it == "weights"


class Marked(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.quint8),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        lambda: torch.ones(3).as_subclass(Marked),
        lambda: torch.empty(3, 2, device="meta"),
    ],
    ids=["sparse", "csr", "quantized", "conjugated", "negated", "subclass", "meta"],
)
def test_tensors_of_other_kinds_arrive_too(make: Any) -> None:
    here = make()
    arrived = there(here)
    assert type(arrived) is type(here)
    assert arrived.layout == here.layout
    assert arrived.dtype == here.dtype
    assert arrived.shape == here.shape
    if here.is_quantized:
        assert torch.equal(arrived.int_repr(), here.int_repr())
    elif here.device.type != "meta":
        assert torch.equal(arrived.to_dense(), here.to_dense())


def test_a_large_bytes_object_is_not_copied_into_the_pickle_piece_by_piece() -> None:
    data = b"x" * 10_000_000
    assert there({"data": data})["data"] == data


def test_the_reducer_needs_no_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch\n"
        "from distsession.protocol import serialize\n"
        "from distsession.engine.tensors import Tensors\n"
        "serialize.use_reducer(Tensors)\n"
        "frames = serialize.dump_value(torch.ones(5), what='it')\n"
        "print(serialize.load([bytearray(f) for f in frames]).sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["5.0"]
