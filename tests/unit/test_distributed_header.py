"""Rows, containers, operations and samplers: what needs no group."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distsession.devices import NCCL_NAMES
from distsession.distributed.containers import leaves, rebuilt
from distsession.distributed.data import DistributedProxySampler, ExactSampler, get_sampler
from distsession.distributed.handshake import as_bytes
from distsession.distributed.header import Call, Header, copied, joined, pack, unpack
from distsession.distributed.reduce_ops import operation_name, plan, reduce_numbers
from distsession.errors import OptionsError

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")


def there_and_back(value: Any) -> Any:
    row, follows = pack(value, Call.BROADCAST, 3)
    numbers = row.numbers()
    assert all(isinstance(number, int) for number in numbers)
    assert Header.from_numbers(torch.tensor(numbers).tolist()) == row
    return unpack(row, as_bytes(follows, CPU))


@given(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.complex_numbers(allow_nan=False)
    | st.lists(st.integers())
)
def test_values_survive(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.uint64, torch.bfloat16, torch.complex64, torch.float64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_survive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(math.prod(shape)).view(shape).to(dtype)
    back = there_and_back(value)
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back, value)


def test_strided_conjugated_and_deep_tensors_survive() -> None:
    turned = torch.arange(6).view(2, 3).t()
    assert torch.equal(there_and_back(turned), turned)
    conjugated = torch.tensor([1 + 2j]).conj()
    assert torch.equal(there_and_back(conjugated), conjugated)
    deep = torch.zeros([1] * 20)
    assert there_and_back(deep).shape == deep.shape
    with pytest.raises(TypeError, match="dense"):
        pack(torch.eye(2).to_sparse(), Call.GATHER)


def test_numpys_numbers_become_pythons() -> None:
    assert there_and_back(np.float32(0.5)) == 0.5
    assert there_and_back(np.int64(7)) == 7


def test_containers_keep_their_kinds_and_order() -> None:
    value = {"b": [1, (2, Point(3, 4))], "a": OrderedDict(z=5)}
    paths = list(leaves(value))
    assert paths[0] == ("['a']['z']", 5)
    items = iter([10 * leaf for _, leaf in paths])
    back = rebuilt(value, lambda: next(items))
    assert back == {"b": [10, (20, Point(30, 40))], "a": OrderedDict(z=50)}
    assert list(back) == ["b", "a"]
    assert isinstance(back["a"], OrderedDict)
    assert isinstance(back["b"][1][1], Point)


def test_operations_have_names_in_either_case() -> None:
    assert operation_name("sum") == operation_name("SUM") == "SUM"
    assert operation_name("mean") == "AVG"
    assert operation_name(dist.ReduceOp.BAND) == "AND"
    with pytest.raises(OptionsError, match="'median'"):
        operation_name("median")


@pytest.mark.parametrize("backend", NCCL_NAMES)
def test_what_nccl_cannot_do(backend: str) -> None:
    with pytest.raises(OptionsError, match="NCCL has no bitwise"):
        plan("AND", torch.int32, backend)
    with pytest.raises(OptionsError, match="NCCL has no bitwise"):
        plan("XOR", torch.bool, backend)
    assert plan("OR", torch.bool, backend).op == dist.ReduceOp.MAX
    for kind in ("gloo", backend):
        with pytest.raises(OptionsError, match="uint64"):
            plan("SUM", torch.uint64, kind)
    assert plan("AVG", torch.float16, backend).divide


def test_numbers_are_reduced_exactly() -> None:
    assert reduce_numbers("SUM", [2**70, 1]) == 2**70 + 1
    assert reduce_numbers("AND", [True, True]) is True
    assert reduce_numbers("XOR", [5, 3]) == 6
    assert reduce_numbers("AVG", [1, 2]) == 1.5


@given(st.integers(0, 40), st.integers(1, 6), st.booleans())
def test_exact_shares_are_a_partition(size: int, shares: int, shuffle: bool) -> None:
    samplers = [ExactSampler(range(size), shares, rank, shuffle) for rank in range(shares)]
    assert [len(s) for s in samplers] == [len(list(s)) for s in samplers]
    assert sorted(i for s in samplers for i in s) == list(range(size))


def test_an_epoch_has_another_order() -> None:
    sampler = ExactSampler(range(50), 1, 0, shuffle=True)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_the_order_is_the_same_on_whatever_default_device() -> None:
    sampler = ExactSampler(range(50), 1, 0, shuffle=True)
    first = list(sampler)
    with torch.device("meta"):
        assert list(sampler) == first


def test_samplers_refuse_what_cannot_be() -> None:
    with pytest.raises(OptionsError, match="choose one"):
        get_sampler(range(3), exact=True, drop_last=True)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="rank=2"):
        get_sampler(range(3), num_replicas=2, rank=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="distributed already"):
        DistributedProxySampler(ExactSampler(range(3)))


class Wrapped(torch.Tensor):
    """One that may lie elsewhere than it says."""


COPIED = {
    "plain": torch.arange(6.0),
    "of some dimensions": torch.arange(6).view(2, 3),
    "without dimensions": torch.tensor(3.5),
    "of half the size": torch.arange(4, dtype=torch.bfloat16),
    "of truth values": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.arange(6.0).view(2, 3).T,
    "a part": torch.arange(10)[3:7],
    "expanded": torch.ones(1, 3).expand(2, 3),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "zeros without memory": torch._efficientzerotensor((4,)),
    "with a gradient": torch.nn.Parameter(torch.ones(3)),
    "in the midst of a graph": torch.nn.Parameter(torch.ones(3)) * 2,
    "of a class of its own": torch.arange(4.0).as_subclass(Wrapped),
}


@pytest.mark.parametrize("what", COPIED)
def test_a_tensors_bytes_are_those_that_it_shows(what: str) -> None:
    tensor = COPIED[what]
    raw = copied(tensor)
    assert len(raw) == tensor.numel() * tensor.element_size()
    made = joined([raw], tensor.dtype, tensor.shape)
    assert made.tolist() == torch.zeros_like(made).copy_(tensor.detach()).tolist()
    assert not made.requires_grad


def test_what_is_joined_has_memory_of_its_own_that_can_be_resized() -> None:
    raw = copied(torch.arange(4.0))
    first, second = joined([raw], torch.float32, (4,)), joined([raw, raw], torch.float32, (8,))
    first.resize_(100)
    second.add_(1)
    assert raw == copied(torch.arange(4.0))


def test_the_headers_of_tensors_that_are_alike_are_one() -> None:
    one, other = pack(torch.ones(2, 3), 3)[0], pack(torch.zeros(2, 3), 3)[0]
    assert one is other
    assert Header.from_raw(one.raw) == one
    unlike = [
        pack(torch.ones(3, 2), 3)[0],
        pack(torch.ones(2, 3), 4)[0],
        pack(torch.ones(2, 3), 3, 1)[0],
        pack(torch.ones(2, 3, dtype=torch.int32), 3)[0],
    ]
    assert len({header.raw for header in [one, *unlike]}) == 5
