"""What is kept of what ran."""

from __future__ import annotations

import functools
import math
import os
import sys
import types

import pytest

from distsession.export import history, needs
from distsession.export.history import Call, Cell, History

SOURCE = """
import math as m
from os import path
lr = 0.1
big = object()

class Net:
    def forward(self):
        return m.pi * lr

def inner():
    return path.sep

def train(steps, scale=1):
    net = Net()
    return inner(), net.forward() * steps, rank

def uses_big():
    return big

def counts():
    global count
    count = 1

def makes():
    return lambda: lr
"""


@pytest.fixture
def notebook(monkeypatch):
    """A module that passes for a notebook."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(SOURCE, "<notebook>", "exec"), module.__dict__)
    return module


def recorded(function, *args, ranks=(0, 1), **kwargs) -> Call:
    known = History()
    entry = known.call(ranks, function, args, kwargs)
    assert isinstance(entry, Call)
    return entry


def test_only_what_succeeded_counts_in_the_order_of_beginning():
    known = History()
    first = known.cell([0, 1], "a", "In[1]")
    second = known.cell([0, 1], "b", "In[2]")
    third = known.cell([0, 1], "c", "In[3]")
    known.keep(third)
    known.keep(first)

    assert known.entries == (first, third)
    assert second not in known.entries


def test_a_call_is_kept_as_text_with_what_it_uses(notebook):
    call = recorded(notebook.train, 3, scale=[1, "two"])

    assert (call.name, call.problem) == ("session.run(train)", "")
    assert call.arguments == "3, scale=[1, 'two']"
    needs = {name: each.text for name, each in call.needs.items()}
    assert needs == {
        "train": "",
        "Net": "",
        "inner": "",
        "m": "import math as m",
        "lr": "lr = 0.1",
        "path": f"import {os.path.__name__} as path",
    }


def test_a_value_is_that_of_the_time_of_the_call(notebook):
    known = History()
    call = known.call([0], notebook.train, [1], {})
    notebook.lr = 0.5

    assert isinstance(call, Call)
    assert call.needs["lr"].text == "lr = 0.1"


def test_functions_of_modules_are_imported():
    assert recorded(math.sqrt, 2).needs["sqrt"].text == "from math import sqrt"
    assert recorded(os.path.join, "a").needs["join"].text.startswith("from posixpath import join")
    found = recorded(History.clear, None).needs["History.clear"].text
    assert found == "from distsession.export.history import History\nHistory.clear = History.clear"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda n: (lambda: 1, ()), "was made within another function"),
        (lambda n: (n.makes(), ()), "was made within another function"),
        (lambda n: (functools.partial(n.train, 1), ()), "partial is of type partial"),
        (lambda n: (n.train, (object(),)), "its argument 0 is of type object"),
        (lambda n: (n.train, (math.inf,)), "its argument 0 is of type float"),
        (lambda n: (n.uses_big, ()), "big is of type object"),
    ],
)
def test_what_cannot_be_written_says_why(notebook, make, problem):
    function, args = make(notebook)

    assert problem in recorded(function, *args).problem


def test_names_that_a_function_stores_are_known(notebook):
    assert needs.stored_names(notebook.counts.__code__) == {"count"}
    assert recorded(notebook.counts).problem == ""


def test_the_same_call_in_succession_is_one_entry(notebook):
    known = History()
    for number in (1, 1, 1, 2, 1):
        known.keep(known.call([0, 1], notebook.train, [number], {}))

    assert [(e.arguments, e.times) for e in known.entries] == [("1", 3), ("2", 1), ("1", 1)]


def test_too_many_are_forgotten_and_counted(monkeypatch):
    monkeypatch.setattr(history, "LIMIT", 3)
    known = History()
    for number in range(5):
        known.keep(known.cell([0], f"{number}", f"In[{number}]"))

    assert [entry.name for entry in known.entries] == ["In[2]", "In[3]", "In[4]"]
    assert known.forgotten == 2
    known.clear()
    assert (known.entries, known.forgotten) == ((), 0)


def test_an_object_that_cannot_be_looked_at_does_no_harm():
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError(name)

        def __call__(self):
            pass

    entry = History().call([0], Odd(), [], {})

    assert entry.problem == "looking at it raises RuntimeError"


def test_what_is_large_is_not_kept():
    assert recorded(len, "x" * 10_000).problem == "its argument 0 is of type str"
    assert recorded(len, list(range(10_000))).problem == "its argument 0 is of type list"


def test_plain_variables_that_are_pushed_are_as_good_as_a_cell():
    history = History()
    history.keep(history.pushed((0, 1), {"lr": 0.1, "names": ["a", "b"]}, "push"))
    (entry,) = history.entries
    assert isinstance(entry, Cell)
    assert (entry.name, entry.source) == (
        "session.push(lr, names)",
        "lr = 0.1\nnames = ['a', 'b']\n",
    )


def test_other_variables_that_are_pushed_are_named():
    history = History()
    history.keep(history.pushed((0, 1), {"lr": 0.1, "model": object()}, "push"))
    history.keep(history.pushed((0, 1), {"parts": [1, 2]}, "scatter"))
    assert [(entry.name, entry.problem) for entry in history.entries] == [
        (
            "session.push(lr, model)",
            "model is of type object, in the notebook: make it in a cell instead",
        ),
        (
            "session.scatter(parts)",
            "parts is of type list, in the notebook: make it in a cell instead",
        ),
    ]
