"""Calling a function of the notebook on a rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from distsession.engine.execute import run_call
from distsession.protocol.serialize import dump_call, load

pytestmark = pytest.mark.usefixtures("fresh_rank")


def notebook(source: str, **names: Any) -> dict[str, Any]:
    """The globals of a notebook in which this was run."""
    namespace = {"__name__": "__main__", **names}
    exec(source, namespace)
    return namespace


def call(function: Any, *args: Any, on: dict[str, Any], **kwargs: Any) -> Any:
    """Send a function to a rank with this namespace, and call it there."""
    frames = [bytes(frame) for frame in dump_call(function, args, kwargs)]
    return run_call(*load(frames), on)


def test_a_function_gets_its_arguments_and_gives_its_value() -> None:
    add = notebook("def add(a, *, b): return a + b")["add"]
    assert call(add, 1, on={}, b=2) == 3


def test_names_that_the_notebook_does_not_have_are_the_ranks() -> None:
    mine = notebook("def mine(): return rank, world_size")["mine"]
    assert call(mine, on={"rank": 3, "world_size": 4}) == (3, 4)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    def inner(): return rank\n    return inner()",
        "def f(): return [rank for _ in range(1)][0]",
        "def helper(): return rank\ndef f(): return helper()",
        "class Model:\n    def go(self): return rank\ndef f(): return Model().go()",
        "f = lambda: rank",
        "import functools\nf = functools.partial(lambda x: rank, 0)",
        "def make():\n    def inner(): return rank\n    return lambda: inner()\nf = make()",
        "async def f(): return rank",
    ],
    ids=["nested", "generator", "helper", "class", "lambda", "partial", "closure", "coroutine"],
)
def test_the_ranks_names_are_found_from_wherever_the_code_is(source: str) -> None:
    assert call(notebook(source)["f"], on={"rank": 3}) == 3


def test_functions_that_are_arguments_find_the_ranks_names() -> None:
    names = notebook("def apply(f, x): return f(x)\ndef shift(x): return x + rank")
    assert call(names["apply"], names["shift"], 10, on={"rank": 3}) == 13
    assert call(names["apply"], on={"rank": 4}, f=names["shift"], x=10) == 14


def test_a_method_and_a_callable_object_find_the_ranks_names() -> None:
    names = notebook("class T:\n    def go(self): return rank\n    __call__ = go\nt = T()")
    assert call(names["t"].go, on={"rank": 3}) == 3
    assert (
        call(notebook("class T:\n    def __call__(self): return rank")["T"](), on={"rank": 2}) == 2
    )


def test_the_notebooks_own_names_win() -> None:
    scaled = notebook("scale = 10\ndef scaled(x): return scale * x")["scaled"]
    rank = {"scale": 99}
    assert call(scaled, 2, on=rank) == 20
    assert rank == {"scale": 99}


def test_a_name_that_nobody_has_is_a_name_error() -> None:
    f = notebook("def f(): return nowhere")["f"]
    with pytest.raises(NameError, match="nowhere"):
        call(f, on={"rank": 0})


def test_the_ranks_present_value_is_used_at_each_call() -> None:
    step = notebook("def step(): return model")["step"]
    rank = {"model": 1}
    assert call(step, on=rank) == 1
    rank["model"] = 2
    assert call(step, on=rank) == 2


# --- what a call leaves behind --------------------------------------------------------------------


def test_a_name_declared_global_is_stored_on_the_rank() -> None:
    setup = notebook("def setup(n):\n    global model\n    model = ['m'] * n")["setup"]
    rank: dict[str, Any] = {}
    call(setup, 2, on=rank)
    assert rank == {"model": ["m", "m"]}


def test_a_global_of_the_rank_is_counted_up_from_call_to_call() -> None:
    count = notebook("def count():\n    global steps\n    steps += 1\n    return steps")["count"]
    rank = {"steps": 5}
    assert [call(count, on=rank), call(count, on=rank)] == [6, 7]
    assert rank == {"steps": 7}


def test_a_global_that_a_helper_stores_is_kept_too() -> None:
    f = notebook("def keep(x):\n    global kept\n    kept = x\ndef f(): keep(3)")["f"]
    rank: dict[str, Any] = {}
    call(f, on=rank)
    assert rank == {"kept": 3}


def test_what_was_stored_before_an_error_stays() -> None:
    f = notebook("def f():\n    global seen\n    seen = 1\n    raise KeyError('x')")["f"]
    rank: dict[str, Any] = {}
    with pytest.raises(KeyError, match="x"):
        call(f, on=rank)
    assert rank == {"seen": 1}


def test_nothing_else_of_the_function_reaches_the_rank() -> None:
    source = "import math\nfactor = 2\ndef helper(x): return x\nclass A: pass\n"
    source += (
        "def f(x):\n    local = helper(x) * factor\n    A()\n    return math.floor(local + rank)"
    )
    rank = {"rank": 1}
    assert call(notebook(source)["f"], 3, on=rank) == 7
    assert rank == {"rank": 1}


def test_a_change_within_an_object_of_the_rank_is_seen_by_later_calls() -> None:
    add = notebook("def add(x): history.append(x)")["add"]
    rank: dict[str, Any] = {"history": []}
    call(add, 1, on=rank)
    call(add, 2, on=rank)
    assert rank == {"history": [1, 2]}


# --- functions that are not the notebook's --------------------------------------------------------


def test_a_function_of_a_module_is_called_as_it_is() -> None:
    rank = {"factorial": None, "reduce": None}
    assert call(functools.reduce, max, [3, 9, 4], on=rank) == 9
    assert rank == {"factorial": None, "reduce": None}


def library_function() -> int:
    return rank  # type: ignore[name-defined]  # noqa: F821


def test_a_function_of_a_module_does_not_see_the_ranks_names() -> None:
    with pytest.raises(NameError, match="rank"):
        run_call(library_function, (), {}, {"rank": 3})
    assert "rank" not in globals()


def test_a_coroutine_is_awaited() -> None:
    f = notebook("import asyncio\nasync def f(x): return await asyncio.sleep(0, x)")["f"]
    assert call(f, 5, on={}) == 5
