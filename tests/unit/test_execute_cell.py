"""Running a cell in a rank's namespace."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import pytest

from distsession.engine.execute import NOTHING, PlainFront, run_cell

pytestmark = pytest.mark.usefixtures("fresh_rank")


def cell(source: str, namespace: dict[str, Any] | None = None, **options: Any) -> tuple[Any, bool]:
    namespace = {} if namespace is None else namespace
    return run_cell(source, "In[3]", namespace, PlainFront(), **options)


def value_of(source: str, namespace: dict[str, Any] | None = None) -> Any:
    return cell(source, namespace)[0]


def test_a_cell_has_the_value_of_its_last_expression() -> None:
    assert cell("x = 2\nx * 21") == (42, True)


@pytest.mark.parametrize("source", ["x = 1", "x = 1;", "def f(): pass", "", "  \n", "# nothing"])
def test_a_cell_that_ends_in_a_statement_has_no_value(source: str) -> None:
    assert cell(source) == (NOTHING, False)


def test_none_is_a_value_that_is_not_shown() -> None:
    assert cell("None") == (None, False)


@pytest.mark.parametrize("source", ["1;", "1 ;  ", "1;\n", "1;  # why", "1;\n# why\n\n", "'a';"])
def test_a_semicolon_at_the_end_keeps_the_value_from_being_shown(source: str) -> None:
    value, shown = cell(source)
    assert value in (1, "a")
    assert not shown


@pytest.mark.parametrize(
    "source", ["1  # not this;", "'a;'", "'''\n;'''", "x = 1; x", "1\n# ;", "f'{1};'", '"#;"']
)
def test_a_semicolon_elsewhere_does_not(source: str) -> None:
    assert cell(source)[1]


def test_names_stay_from_one_cell_to_the_next() -> None:
    namespace: dict[str, Any] = {}
    cell("def double(x):\n    return factor * x", namespace)
    cell("factor = 2", namespace)
    assert value_of("double(4)", namespace) == 8


def test_what_ran_before_an_error_stays() -> None:
    namespace: dict[str, Any] = {}
    with pytest.raises(ZeroDivisionError):
        cell("x = 1\n1 / 0\nx = 2", namespace)
    assert namespace["x"] == 1


# --- await ----------------------------------------------------------------------------------------


def test_a_cell_may_await() -> None:
    source = "import asyncio\nx = await asyncio.sleep(0, 3)\nawait asyncio.sleep(0, x + 1)"
    assert cell(source) == (4, True)


def test_cells_that_await_share_an_event_loop() -> None:
    namespace: dict[str, Any] = {}
    cell("import asyncio\ntask = None\nasync def work():\n    return 7", namespace)
    cell("task = asyncio.create_task(work())\nx = await asyncio.sleep(0)", namespace)
    assert value_of("await task", namespace) == 7


@pytest.mark.parametrize("last", ["await task", "x = await task\nx", "await task\ntask.result()"])
def test_all_of_a_cell_that_awaits_finds_a_running_loop(last: str) -> None:
    source = "import asyncio\nasync def work(): return 7\ntask = asyncio.create_task(work())\n"
    assert value_of(source + last) == 7
    assert value_of(f"{source}await asyncio.sleep(0)\nasyncio.get_running_loop().time() > 0")


def test_a_cell_that_does_not_await_finds_no_running_loop() -> None:
    source = "import asyncio\nasync def work(): return 7\n"
    assert value_of(f"{source}asyncio.run(work())") == 7


def test_an_error_in_a_cell_that_awaits_is_its_own() -> None:
    with pytest.raises(KeyError, match="gone"):
        cell("import asyncio\nawait asyncio.sleep(0)\n{}['gone']")


# --- errors ---------------------------------------------------------------------------------------


def test_a_syntax_error_names_the_cell_and_runs_nothing() -> None:
    namespace: dict[str, Any] = {}
    with pytest.raises(SyntaxError) as raised:
        cell("x = 1\ny = = 2", namespace)
    assert (raised.value.filename, raised.value.lineno) == ("In[3]", 2)
    assert namespace == {}


def test_a_traceback_names_the_cell_and_shows_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        cell("def f():\n    return 1 / 0\n\nf()")
    frames = [f for f in traceback.extract_tb(raised.value.__traceback__) if f.filename == "In[3]"]
    assert [(frame.lineno, frame.line) for frame in frames] == [(4, "f()"), (2, "return 1 / 0")]


def test_the_source_of_a_function_of_a_cell_can_be_read() -> None:
    source = "def f():\n    return 1\n"
    assert value_of(source + "import inspect\ninspect.getsource(f)") == source


# --- from __future__ ------------------------------------------------------------------------------


def test_a_future_import_stays_in_force() -> None:
    namespace: dict[str, Any] = {}
    cell("from __future__ import annotations", namespace)
    cell("def f(x: not_defined): ...", namespace)
    assert namespace["f"].__annotations__ == {"x": "not_defined"}


def test_a_future_import_of_this_package_does_not_reach_the_cell() -> None:
    with pytest.raises(NameError, match="not_defined"):
        cell("def f(x: not_defined): ...")


# --- expressions ----------------------------------------------------------------------------------


def test_an_expression_gives_its_value() -> None:
    assert cell("  x + 1  # next\n", {"x": 1}, expression=True) == (2, True)
    assert cell("await __import__('asyncio').sleep(0, 5)", expression=True) == (5, True)


@pytest.mark.parametrize("source", ["x = 1", "import os", "1; 2", "", "1\n2"])
def test_what_is_no_expression_is_a_syntax_error(source: str) -> None:
    with pytest.raises(SyntaxError) as raised:
        cell(source, expression=True)
    assert raised.value.filename == "In[3]"


# --- the front ------------------------------------------------------------------------------------


class Front(PlainFront):
    """Knows one magic, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def transform(self, source: str) -> str:
        return source.replace("%answer", "42")

    def before(self, source: str) -> None:
        self.told.append(f"before {source}")

    def after(self) -> None:
        self.told.append("after")


def test_magics_are_turned_into_python_first() -> None:
    assert run_cell("%answer + 1", "In[1]", {}, Front()) == (43, True)


@pytest.mark.parametrize("source", ["1", "1 / 0"])
def test_the_front_is_told_of_the_begin_and_the_end_of_a_cell(source: str) -> None:
    front = Front()
    with contextlib.suppress(ZeroDivisionError):
        run_cell(source, "In[1]", {}, front)
    assert front.told == [f"before {source}", "after"]


def test_a_cell_that_cannot_be_compiled_does_not_begin() -> None:
    front = Front()
    with pytest.raises(SyntaxError):
        run_cell("1 +", "In[1]", {}, front)
    assert front.told == []


def test_without_ipython_a_value_is_shown_by_its_repr() -> None:
    assert PlainFront().render("a") == ({"text/plain": "'a'"}, {})
