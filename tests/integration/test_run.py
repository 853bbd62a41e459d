"""Functions on ranks: what arrives, what comes back."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
import time

import numpy as np
import pytest
import torch

from distsession import OptionsError, RankResults, RunError, SerializationError, Session


def by_value(source: str, name: str, **more):
    """A function as a notebook would define it: in ``__main__``, with these globals."""
    namespace = {"__name__": "__main__", **more}
    exec(source, namespace)
    return namespace[name]


def test_each_rank_answers_under_its_own_number(session: Session) -> None:
    out = session.run(lambda: int(os.environ["RANK"]))
    assert isinstance(out, RankResults)
    assert dict(out) == {0: 0, 1: 1}
    assert out.ranks == (0, 1)
    assert list(out.values()) == [0, 1]
    assert out.duration > 0
    assert set(out.durations) == {0, 1}


def test_a_view_runs_on_its_ranks_alone(session: Session) -> None:
    whoami = lambda: int(os.environ["RANK"])  # noqa: E731
    assert dict(session[1].run(whoami)) == {1: 1}
    assert dict(session[0:1].run(whoami)) == {0: 0}
    assert dict(session[[0, 1]].run(whoami)) == {0: 0, 1: 1}
    assert dict(session[-1].run(whoami)) == {1: 1}


def test_a_rank_outside_the_world_is_refused(session: Session) -> None:
    with pytest.raises(OptionsError, match="ranks 0 to 1"):
        session[2]
    with pytest.raises(OptionsError, match="ranks 0 to 1"):
        session[[0, 5]]


def test_arguments_and_keywords_all_belong_to_the_function(session: Session) -> None:
    def add(function, timeout, ranks=0, *, label):
        return function + timeout + ranks + label

    assert list(session.run(add, 1, timeout=2, ranks=3, label=4).values()) == [10, 10]


def test_closures_lambdas_and_partials_travel(session: Session) -> None:
    factor = 3
    assert session.run(lambda x: x * factor, 2)[1] == 6
    assert session.run(functools.partial(pow, 2), 5)[0] == 32


def test_a_class_of_the_notebook_travels_both_ways(session: Session) -> None:
    make = by_value("class Point:\n    def __init__(self, x): self.x = x\n", "Point")
    back = session.run(lambda p: make(p.x + 1), make(1))
    assert [point.x for point in back.values()] == [2, 2]


def test_a_collective_joins_all_ranks(session: Session) -> None:
    def total(x):
        t = torch.tensor([float(x * torch.distributed.get_rank())])
        torch.distributed.all_reduce(t)
        return t.item()

    assert list(session.run(total, 5).values()) == [5.0, 5.0]


def test_names_of_the_rank_are_found_where_the_notebook_has_none(session: Session) -> None:
    session.execute("made_here = rank + 100")
    function = by_value("def f(): return made_here, rank, world_size, str(device)", "f")
    assert dict(session.run(function)) == {0: (100, 0, 2, "cpu"), 1: (101, 1, 2, "cpu")}


def test_names_of_the_notebook_win_and_leave_the_rank_alone(session: Session) -> None:
    session.execute("x = 'of the rank'")
    function = by_value("def f(): return x", "f", x="of the notebook")
    assert session.run(function)[0] == "of the notebook"
    assert session.evaluate("x")[0] == "of the rank"


def test_a_global_statement_stores_on_the_rank(session: Session) -> None:
    session.run(by_value("def f():\n    global kept\n    kept = rank * 2\n", "f"))
    assert dict(session.evaluate("kept")) == {0: 0, 1: 2}


def test_running_invents_no_names_on_the_rank(session: Session) -> None:
    before = session.evaluate("sorted(globals())")
    session.run(by_value("def f(a): return a + offset", "f", offset=1), 1)
    assert session.evaluate("sorted(globals())") == before


def test_arrays_and_tensors_come_back_as_they_were(session: Session) -> None:
    array = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    tensor = torch.arange(12.0).reshape(3, 4)
    back = session.run(lambda a, t: (a * 2, t + 1), array, tensor)
    for doubled, more in back.values():
        np.testing.assert_array_equal(doubled, array * 2)
        assert torch.equal(more, tensor + 1)


def test_submit_gives_a_future_and_calls_keep_their_order(session: Session) -> None:
    session.execute("seen = []")
    append = by_value("def f(i):\n    seen.append(i)\n    return i\n", "f")
    futures = [session.submit(append, i) for i in range(20)]
    assert all(isinstance(f, concurrent.futures.Future) for f in futures)
    assert [f.result(30)[0] for f in futures] == list(range(20))
    assert session.evaluate("seen")[1] == list(range(20))


def test_a_future_raises_what_run_would_raise(session: Session) -> None:
    future = session.submit(lambda: 1 / 0)
    with pytest.raises(RunError) as caught:
        future.result(30)
    assert isinstance(caught.value.first, ZeroDivisionError)


def test_threads_of_the_kernel_may_call_at_the_same_time(session: Session) -> None:
    results: dict[int, list[int]] = {}

    def caller(number: int) -> None:
        results[number] = [session.run(lambda: number)[1] for _ in range(20)]

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {n: [n] * 20 for n in range(4)}


def test_what_cannot_be_sent_is_named(session: Session) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"argument hooks= .*\['a'\]\[1\].*bytes"):
        session.run(print, hooks={"a": [1, lock]})
    with pytest.raises(SerializationError, match="closure variable lock"):
        session.run(lambda: lock)


def test_a_result_that_cannot_be_sent_is_named_and_the_rank_lives(session: Session) -> None:
    with pytest.raises(RunError, match="the result cannot be sent: a generator"):
        session.run(lambda: (i for i in range(3)))
    assert session.run(lambda: 1)[0] == 1


def test_a_result_that_cannot_be_rebuilt_here_is_said(session: Session) -> None:
    # the rank's class exists; the module it claims to be from does not exist in this process
    make = by_value(
        "import sys, types\n"
        "def f():\n"
        "    import sys, types\n"
        "    module = types.ModuleType('only_on_the_rank')\n"
        "    exec('class Thing: pass', module.__dict__)\n"
        "    sys.modules['only_on_the_rank'] = module\n"
        "    return module.Thing()\n",
        "f",
    )
    with pytest.raises(RunError, match="only_on_the_rank"):
        session.run(make)
    assert session.run(lambda: 1)[1] == 1


def test_the_wrong_kind_of_first_argument_is_refused(session: Session) -> None:
    with pytest.raises(TypeError, match=r"execute\(\)"):
        session.run("print(1)")  # type: ignore[arg-type]


def test_user_code_finds_no_running_event_loop(session: Session) -> None:
    def loops():
        import asyncio

        return asyncio.run(asyncio.sleep(0, "slept"))

    assert session.run(loops)[0] == "slept"


def test_an_async_function_is_awaited(session: Session) -> None:
    async def later():
        import asyncio

        await asyncio.sleep(0.01)
        return "done"

    assert session.run(later)[1] == "done"


def test_random_numbers_differ_from_rank_to_rank(session: Session) -> None:
    def draw():
        import random

        return torch.rand(1).item(), random.random(), np.random.rand()

    first, second = session.run(draw).values()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_slow_rank_does_not_hold_up_another_view(session: Session) -> None:
    slow = session[0].submit(time.sleep, 0.5)
    assert session[1].run(lambda: "quick")[1] == "quick"
    assert not slow.done()
    slow.result(10)
