"""Exceptions of user code as data, whatever they do."""

from __future__ import annotations

import asyncio
import io
import linecache
import pickle
import sys
import threading
import tokenize
from typing import Any

import pytest

from distsession.engine import cause
from distsession.engine.execute import PlainFront, run_call, run_cell
from distsession.engine.failure import (
    describe,
    forget_frames,
    innermost,
    is_user_code,
    name_cell,
    pickled,
    short_name,
    stack,
)
from distsession.protocol.messages import Abort, AbortReason, ErrorInfo, FrameInfo
from distsession.protocol.serialize import load


def raised(function: Any) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def from_cell(source: str, label: str = "In[5]") -> ErrorInfo:
    return describe(raised(lambda: run_cell(source, label, {}, PlainFront())))


def frames_of_user(info: ErrorInfo) -> list[tuple[str, int, str]]:
    frames = [(frame.filename, frame.lineno, frame.name) for frame in info.frames]
    return [frame for frame in frames if frame[0] != __file__]


def test_an_error_has_its_class_and_its_message() -> None:
    info = describe(ValueError("no such thing"))
    assert (info.ename, info.evalue) == ("ValueError", "no such thing")
    assert (info.frames, info.notes, info.cause) == ((), (), None)


def test_the_frames_are_those_of_the_user() -> None:
    # The test's own frames stand where on a rank there are only the engine's.
    run = from_cell("def f(x):\n    y = 1\n    return y / x\n\nf(0)")
    assert frames_of_user(run)[-2:] == [("In[5]", 5, "<module>"), ("In[5]", 3, "f")]


def test_the_engines_own_frames_come_off_the_top() -> None:
    error = raised(lambda: run_call(lambda: 1 / 0, (), {}, {}))  # type: ignore[arg-type]
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    assert [frame.filename for frame in describe(error).frames] == [__file__]


def test_a_frame_shows_the_lines_around_the_failing_one() -> None:
    info = from_cell("a = 1\nb = 2\nc = 1 / 0\nd = 4\n\n\n")
    assert info.frames[-1].context == ((1, "a = 1"), (2, "b = 2"), (3, "c = 1 / 0"), (4, "d = 4"))


def test_a_frame_without_source_has_no_lines() -> None:
    linecache.cache.pop("<nowhere>", None)
    error = raised(lambda: exec(compile("1 / 0", "<nowhere>", "exec"), {}))
    assert describe(error).frames[-1].context == ()


def test_a_recursion_is_told_once_with_how_often_it_came() -> None:
    info = from_cell("def f():\n    f()\n\nf()")
    assert info.ename == "RecursionError"
    *_, first, repeated = info.frames
    assert (first.name, first.lineno, first.again) == ("<module>", 4, 0)
    assert (repeated.name, repeated.lineno, repeated.cycle) == ("f", 2, 1)
    assert repeated.again > 800


def test_functions_that_call_each_other_are_told_once() -> None:
    info = from_cell("def f(n):\n    g(n)\ndef g(n):\n    if n == 0: 1 / 0\n    f(n - 1)\nf(30)")
    told = [(frame.name, frame.lineno, frame.cycle, frame.again) for frame in info.frames]
    assert told[-5:] == [
        ("<module>", 6, 0, 0), ("f", 2, 0, 0), ("g", 5, 2, 29), ("f", 2, 0, 0), ("g", 4, 0, 0),
    ]  # fmt: skip


def test_a_function_that_calls_itself_twice_is_shown_as_it_is() -> None:
    info = from_cell("def f(n):\n    return f(n - 1) if n else 1 / 0\nf(2)")
    assert [(frame.name, frame.again) for frame in info.frames][-4:] == [
        ("<module>", 0), ("f", 0), ("f", 0), ("f", 0),
    ]  # fmt: skip


def test_a_syntax_error_shows_its_line_with_a_caret() -> None:
    info = from_cell("x = 1\ny = 2 2")
    assert info.ename == "SyntaxError"
    assert info.evalue.startswith("invalid syntax")
    assert info.syntax is not None
    assert (info.syntax.filename, info.syntax.lineno) == ("In[5]", 2)
    line, marks = (text for _, text in info.syntax.context)
    assert line.strip() == "y = 2 2"
    assert set(marks.strip()) == {"^"}


class Front(PlainFront):
    """Tokenizes a cell, as IPython does."""

    def transform(self, source: str) -> str:
        list(tokenize.generate_tokens(io.StringIO(source).readline))
        return source


def test_a_tokenizers_error_is_one_of_the_cell() -> None:
    source = "\n\nif True:\n  y = 1\n z = 2\n"
    error = raised(lambda: run_cell(source, "In[5]", {}, Front()))
    info = describe(error)
    assert info.ename == "IndentationError"
    assert not any("tokenize" in frame.filename for frame in info.frames)
    assert info.evalue == "unindent does not match any outer indentation level"
    assert info.syntax is not None
    assert (info.syntax.filename, info.syntax.lineno) == ("In[5]", 5)
    assert info.syntax.context[0][1].strip() == "z = 2"


@pytest.mark.parametrize("lineno", [None, 7])
def test_a_syntax_error_that_is_raised_by_hand_is_told(lineno: int | None) -> None:
    error = SyntaxError("not so", ("config.txt", lineno, None, None))
    info = describe(error)
    assert info.evalue.startswith("not so")
    place = None if info.syntax is None else (info.syntax.filename, info.syntax.lineno)
    assert place == (None if lineno is None else ("config.txt", 7))


def test_code_of_the_notebook_is_named_after_its_cell() -> None:
    name = "/tmp/ipykernel_5/99.py"
    space: dict[str, Any] = {}
    exec(compile("def f():\n    return 1 / 0", name, "exec"), space)
    assert innermost(describe(raised(space["f"])).frames) == "notebook cell line 2"
    name_cell(name, "In[8]")
    assert innermost(describe(raised(space["f"])).frames) == "In[8] line 2"
    assert short_name(name) == "In[8]"
    name_cell("<ipython-input-4-abc>", "In[4]")
    assert is_user_code("<ipython-input-4-abc>")


def test_causes_are_told_from_errors_while_handling() -> None:
    declared = from_cell(
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError from e"
    )
    assert declared.cause is not None
    assert (declared.cause.ename, declared.cause_is_explicit) == ("ZeroDivisionError", True)
    handling = from_cell("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError")
    assert handling.cause is not None
    assert (handling.cause.ename, handling.cause_is_explicit) == ("ZeroDivisionError", False)


def test_an_error_from_none_has_no_cause() -> None:
    source = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x') from None"
    assert from_cell(source).cause is None


def test_notes_are_kept() -> None:
    error = ValueError("x")
    error.add_note("epoch 3")
    assert describe(error).notes == ("epoch 3",)


def test_a_group_says_what_it_contains() -> None:
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("in", [KeyError("b")])])
    assert describe(group).notes == (
        "contains ValueError: a",
        "contains ExceptionGroup: in (1 sub-exception)",
        "  contains KeyError: 'b'",
    )


def test_a_chain_of_any_length_is_described_in_part() -> None:
    error = ValueError("the last")
    last = error
    for number in range(5000):
        last.__cause__ = ValueError(str(number))
        last = last.__cause__
    info = describe(error)
    links = 0
    while info.cause is not None:
        info, links = info.cause, links + 1
    assert 3 < links < 100


def test_a_chain_that_bites_its_tail_is_described() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    info = describe(first)
    assert info.cause is not None
    assert (info.evalue, info.cause.evalue) == ("first", "second")


class RaisingStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class RaisingRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr for you")


class RaisingNotes(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes for you")


class OddStr(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class RaisingGetattr(Exception):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class InterruptingStr(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class LeavingStr(Exception):
    def __str__(self) -> str:
        sys.exit(3)


class LeavingCause(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        sys.exit(3)


class FixedTraceback(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise KeyboardInterrupt


class OddDict(Exception):
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise SystemExit


ODD = [
    RaisingStr,
    RaisingRepr,
    RaisingNotes,
    OddStr,
    RaisingGetattr,
    InterruptingStr,
    LeavingStr,
    FixedTraceback,
    OddDict,
]


@pytest.mark.parametrize("cls", [*ODD, LeavingCause])
def test_no_exception_ends_who_looks_for_its_reason_or_lets_go_of_it(cls: type[Exception]) -> None:
    error = raised(lambda: _raise(cls("text")))
    assert cause.find(error, Abort(AbortReason.STOP, "a text", 1)) is None
    assert cause.find_handled(error, None) is None
    assert describe(error).ename == cls.__name__
    forget_frames(error)
    pickled(error)


def nested_group(depth: int, width: int = 1) -> BaseException:
    error: Exception = ValueError("the innermost")
    for _ in range(depth):
        error = ExceptionGroup("around", [error] * width)
    return error


@pytest.mark.parametrize(("depth", "width"), [(3000, 1), (30, 10)])
def test_a_group_of_groups_is_shown_down_to_some_depth(depth: int, width: int) -> None:
    error = nested_group(depth, width)
    info = describe(error)
    assert info.evalue.startswith("around")
    assert "contains ExceptionGroup: around" in info.notes[0]
    assert 5 < len(info.notes) < 100
    assert any("contains more" in note for note in info.notes)
    assert cause.find(error, Abort(AbortReason.STOP, "a text", 1)) is None
    assert pickled(error) == [] or width > 1


def test_what_is_no_list_of_notes_is_shown_as_python_shows_it() -> None:
    error = ValueError("x")
    error.__notes__ = 5  # type: ignore[assignment]
    assert describe(error).notes == ("5",)
    error.__notes__ = ["first", InterruptingStr(), "last"]  # type: ignore[list-item]
    first, odd, last = describe(error).notes
    assert (first, last) == ("first", "last")
    assert "raises KeyboardInterrupt" in odd


def test_an_exception_whose_message_cannot_be_made_does_not_travel() -> None:
    assert pickled(InterruptingStr()) == []
    assert pickled(ValueError("x"), InterruptingStr()) == []


class Text(str):
    def __getitem__(self, key: Any) -> str:
        raise RuntimeError("no part of it")


def test_a_message_of_a_class_of_its_own_arrives_as_text() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            return Text("the message")

    assert type(describe(Odd()).evalue) is str
    assert describe(Odd()).evalue == "the message"


@pytest.mark.parametrize("cls", ODD)
def test_an_exception_with_methods_that_fail_is_described(cls: type[Exception]) -> None:
    info = describe(raised(lambda: _raise(cls("text"))))
    assert info.ename == cls.__name__
    assert info.frames[-1].name == "_raise"


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("notes", [3, None, [RaisingStr()], [1, None]])
def test_notes_that_are_no_notes_do_not_matter(notes: Any) -> None:
    error = ValueError("x")
    error.__notes__ = notes
    assert describe(error).evalue == "x"


def test_a_message_that_cannot_be_made_is_said_to_be_so() -> None:
    assert "RaisingStr.__str__ raises" in describe(RaisingStr()).evalue


def test_a_huge_message_is_cut() -> None:
    assert len(describe(ValueError("x" * 10_000_000)).evalue) < 100_000


def test_an_exit_and_an_interrupt_are_described() -> None:
    assert describe(SystemExit(3)).evalue == "3"
    assert describe(KeyboardInterrupt()).ename == "KeyboardInterrupt"


def test_every_description_can_be_sent() -> None:
    info = from_cell("raise ValueError('\\udc80')")
    assert pickle.loads(pickle.dumps(info)) == info


@pytest.mark.parametrize(
    ("source", "line", "shown"),
    [
        ("x = 1\nreturn x", 2, "return x"),
        ("x = 1\nyield x", 2, "yield x"),
        ("\n\nbreak", 3, "break"),
        ("def f():\n    nonlocal q", 2, "nonlocal q"),
        ("from __future__ import nope", 1, "from __future__ import nope"),
    ],
)
def test_what_only_the_compiler_refuses_shows_its_line(source: str, line: int, shown: str) -> None:
    syntax = from_cell(source).syntax
    assert syntax is not None
    assert (syntax.filename, syntax.lineno) == ("In[5]", line)
    assert syntax.context[0] == (line, f"    {shown}")


# --- the exception itself -------------------------------------------------------------------------


def test_an_exception_travels_with_its_notes_and_attributes() -> None:
    error = OSError(2, "No such file", "data.bin")
    error.add_note("while loading")
    arrived = load(pickled(error))
    assert (arrived.errno, arrived.filename) == (2, "data.bin")
    assert arrived.__notes__ == ["while loading"]


def test_an_exception_class_of_the_notebook_travels() -> None:
    class Diverged(Exception):
        pass

    assert repr(load(pickled(Diverged("at step 3")))) == "Diverged('at step 3')"


def test_an_exception_that_cannot_be_pickled_gives_no_frames() -> None:
    class Odd(Exception):
        def __reduce__(self) -> Any:
            raise RuntimeError("never")

    assert pickled(ValueError(threading.Lock())) == []
    assert pickled(Odd()) == []
    assert pickled(ValueError(sys._getframe())) == []


@pytest.mark.parametrize(
    "folder",
    [
        "/home/me/.local/lib/python3.12/site-packages",
        "/usr/lib/python3/dist-packages",
        "/venvs/parent/lib/python3.12/site-packages",
    ],
)
def test_a_package_is_no_code_of_the_users_wherever_it_is_installed(folder: str) -> None:
    # torch 2.14 puts a decorator of typing_extensions around some of its functions
    assert not is_user_code(f"{folder}/typing_extensions.py")
    assert is_user_code("/home/me/project/train.py")
    assert is_user_code("In[3]")


def test_a_coroutine_that_waits_is_at_the_line_that_it_awaits() -> None:
    async def inner() -> None:
        await asyncio.sleep(3600)

    async def outer() -> None:
        await inner()

    async def look() -> tuple[FrameInfo, ...]:
        coroutine = outer()
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0)
        frames = stack(None, coroutine)
        task.cancel()
        return frames

    names = [frame.name for frame in asyncio.run(look())]
    assert names[:2] == ["outer", "inner"]
