"""Objects to frames and back."""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distsession.errors import SerializationError
from distsession.protocol import serialize
from distsession.protocol.serialize import dump_call, dump_value, load

plain = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
hashable = plain | st.floats(allow_nan=False) | st.tuples(plain, plain)
nested = st.recursive(
    hashable | st.complex_numbers(allow_nan=False) | st.frozensets(hashable, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def there(value: Any) -> Any:
    """The value as it arrives in another process: its frames are bytes there."""
    return load([bytes(frame) for frame in dump_value(value, what="the value")])


@given(nested)
def test_nested_builtins_arrive_as_they_left(value: Any) -> None:
    arrived = there(value)
    assert arrived == value
    assert type(arrived) is type(value)


@given(st.lists(nested, max_size=3), st.dictionaries(st.text(min_size=1), nested, max_size=3))
def test_a_call_arrives_with_all_of_its_arguments(args: list[Any], kwargs: dict[str, Any]) -> None:
    function, got_args, got_kwargs = load(dump_call(max, args, kwargs))
    assert function is max
    assert (got_args, got_kwargs) == (tuple(args), kwargs)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(20)[::3],
        np.zeros((0, 4)),
        np.array(7.5),
        np.array([1 + 2j]),
    ],
    ids=["2d", "fortran", "strided", "empty", "scalar", "complex"],
)
def test_arrays_come_back_equal(array: np.ndarray) -> None:
    arrived = there({"data": [array]})["data"][0]
    assert arrived.dtype == array.dtype
    np.testing.assert_array_equal(arrived, array)


def test_the_data_of_an_array_is_beside_the_pickle_and_not_in_it() -> None:
    array = np.arange(100_000, dtype=np.int64)
    head, *buffers = dump_value([array, array[:10].copy()], what="the arrays")
    assert len(head) < 1000
    assert [memoryview(buffer).nbytes for buffer in buffers] == [800_000, 80]


def test_it_is_known_before_that_a_value_will_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = dump_value({"x": [torch.ones(2)]}, what="the value")
    assert not serialize.imports_torch(tensor)
    monkeypatch.delitem(sys.modules, "torch")
    assert serialize.imports_torch(tensor)
    assert not serialize.imports_torch(dump_value(np.ones(2), what="the value"))
    assert not serialize.imports_torch([])


def test_an_array_is_sent_from_where_it_lies() -> None:
    array = np.zeros(1000)
    _, buffer = dump_value(array, what="the array")
    array[0] = 3.0
    assert np.frombuffer(buffer)[0] == 3.0


def test_lambdas_closures_and_partials_arrive() -> None:
    factor = 3
    assert there(lambda x: x + 1)(1) == 2
    assert there(lambda x: x * factor)(2) == 6
    assert there(functools.partial(lambda x, y: x - y, 10))(3) == 7


def test_a_class_of_the_notebook_arrives_with_its_instances() -> None:
    @dataclass
    class Point:
        x: int

        def moved(self) -> Point:
            return Point(self.x + 1)

    cls, point = there((Point, Point(4)))
    assert cls(1).moved().x == 2
    assert point.moved().x == 5


def test_a_recursive_function_arrives() -> None:
    def fact(n: int) -> int:
        return 1 if n < 2 else n * fact(n - 1)

    assert there(fact)(5) == 120


def test_a_shared_object_is_still_shared() -> None:
    part = [1]
    first, second = there((part, part))
    assert first is second


def test_a_reducer_is_asked_first_and_gives_the_memory_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tensor:
        pass

    class AsText:
        def __call__(self, obj: Any) -> Any:
            return (str, ("a tensor",)) if isinstance(obj, Tensor) else NotImplemented

        def finish(self, buffers: Any, lend: object = None) -> list[Any]:
            return [bytes(buffer.raw()).upper() for buffer in buffers]

    monkeypatch.setattr(serialize, "_make_reducer", AsText)
    monkeypatch.setitem(sys.modules, "torch", sys)  # only asked if there are tensors at all
    frames = dump_value({"w": Tensor(), "n": 1, "b": PickleBuffer(b"abc")}, what="the result")
    assert load(frames) == {"w": "a tensor", "n": 1, "b": b"ABC"}


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(SerializationError) as refused:
        dump_call(function, args, kwargs)
    return str(refused.value)


def train(*args: Any, **kwargs: Any) -> None: ...


def test_an_argument_that_cannot_be_sent_is_named_by_its_position() -> None:
    text = refusal(train, 1, threading.Lock())
    assert text.startswith("argument 1 of train cannot be sent: a _thread.lock,")
    assert "Make it on the rank instead" in text


def test_a_keyword_argument_that_cannot_be_sent_is_named() -> None:
    assert refusal(train, 1, lock=threading.Lock()).startswith("argument lock= of train cannot")


def test_the_path_to_the_part_at_fault_is_given() -> None:
    assert "(at ['a'][1])" in refusal(train, {"a": [0, threading.Lock()]})


def test_the_attribute_at_fault_is_given() -> None:
    class Loader:
        def __init__(self) -> None:
            self.size = 3
            self.state = {"lock": threading.Lock()}

    text = refusal(train, Loader())
    assert "a _thread.lock (at .state['lock'])" in text


def test_the_closure_variable_at_fault_is_given() -> None:
    guard = threading.Lock()
    text = refusal(lambda: guard)
    assert "the function test_the_closure_variable_at_fault_is_given.<locals>.<lambda>" in text
    assert "a _thread.lock" in text
    assert "closure variable guard" in text


def test_the_global_variable_at_fault_is_given() -> None:
    notebook: dict[str, Any] = {"__name__": "__main__", "guard": threading.Lock()}
    exec("def step():\n    return guard", notebook)
    text = refusal(notebook["step"])
    assert text.startswith("the function step cannot be sent: a _thread.lock")
    assert "global variable guard" in text


def test_a_result_that_cannot_be_sent_is_called_what_its_sender_calls_it() -> None:
    with pytest.raises(SerializationError, match=r"^the result of rank 3 cannot .*a generator"):
        dump_value([1, (n for n in ())], what="the result of rank 3")


def test_the_size_of_what_cannot_be_sent_is_given() -> None:
    class Cache:
        nbytes = 1_234_567

        def __reduce__(self) -> Any:
            raise TypeError("it stays here")

    with pytest.raises(SerializationError, match="1,234,567 bytes: it stays here"):
        dump_value(Cache(), what="the cache")


def test_data_nested_too_deeply_is_refused_and_not_fatal() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="the list cannot be sent"):
        dump_value(deep, what="the list")


def test_an_array_that_arrived_can_be_changed() -> None:
    arrived = there(np.zeros(10))
    arrived += 1
    assert arrived.sum() == 10


def test_the_part_at_fault_is_named_by_its_path() -> None:
    cfg = Config([1, {}, threading.Lock()])
    with pytest.raises(
        SerializationError, match=r"^cfg\.hooks\[2\] cannot be sent: a _thread.lock"
    ):
        dump_value(cfg, what="cfg", path="cfg")


@dataclass
class Config:
    hooks: list[Any]
