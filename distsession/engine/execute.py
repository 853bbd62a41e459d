"""Running functions and cells in a rank's namespace.

The same code serves a rank, where an IPython shell adds magics and rich display, and the inline
launcher, where there is none.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import contextlib
import dis
import functools
import inspect
import io
import linecache
import operator
import signal
import tokenize
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any, Protocol

__all__ = [
    "NOTHING",
    "Front",
    "PlainFront",
    "awaiting",
    "rebound",
    "remember",
    "run_call",
    "run_cell",
]

NOTHING: Any = type("Nothing", (), {"__repr__": lambda self: "NOTHING"})()
"""Stands for the value of a cell that ends in a statement."""

_NOTHING_AROUND: AbstractContextManager[None] = contextlib.nullcontext()

Bundle = tuple[dict[str, Any], dict[str, Any]]


class Front(Protocol):
    """What a cell needs besides Python itself."""

    def transform(self, source: str) -> str:
        """Turn magics and shell escapes into Python."""

    def before(self, source: str) -> None:
        """Called before a cell runs."""

    def after(self) -> None:
        """Called after a cell ran, also when it failed."""

    def render(self, value: Any) -> Bundle | None:
        """The value as a MIME bundle with its metadata; None shows nothing."""


class PlainFront:
    """Cells without IPython: plain Python, shown by ``repr``."""

    def transform(self, source: str) -> str:
        return source

    def before(self, source: str) -> None:
        pass

    def after(self) -> None:
        pass

    def render(self, value: Any) -> Bundle | None:
        return {"text/plain": repr(value)}, {}


class _Compiler:
    """Compiles cells; keeps ``from __future__`` imports of earlier ones, and allows ``await``."""

    _future = functools.reduce(
        operator.or_, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
    )

    def __init__(self) -> None:
        self.flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    def parse(self, source: str, label: str) -> ast.Module:
        tree = compile(source, label, "exec", self.flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        return tree

    def __call__(
        self, source: str | ast.Module | ast.Expression, label: str, mode: str
    ) -> CodeType:
        code: CodeType = compile(source, label, mode, self.flags, dont_inherit=True)
        self.flags |= code.co_flags & self._future
        return code


_compile = _Compiler()
_runner: asyncio.Runner | None = None
_awaiting: object = None


def run_cell(
    source: str,
    label: str,
    namespace: dict[str, Any],
    front: Front,
    *,
    expression: bool = False,
    around: AbstractContextManager[None] = _NOTHING_AROUND,
) -> tuple[Any, bool]:
    """Run a cell.

    Args:
        source: The cell as the user wrote it.
        label: Stands for the file name in tracebacks.
        namespace: Globals of the code.
        front: Magics and rich display.
        expression: The source must be a single expression.
        around: Entered while the user's own code runs; for a cell twice, if it ends in an
            expression.

    Returns:
        The value of the last expression (``NOTHING`` if the cell ends in a statement), and
        whether it is to be shown.
    """
    body = source.lstrip("\n")  # IPython drops empty lines, and lines would be counted from there
    above = len(source) - len(body)
    text = "\n" * above + _transform(body, label, above, front)
    remember(label, text)
    if expression:
        empty = text[: len(text) - len(text.lstrip("\n"))]  # its line is that of the user's cell
        final: CodeType | None = _compile(empty + text.strip(), label, "eval")
        first = None
    else:
        tree = _compile.parse(text, label)
        final_node = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        first = _compile(tree, label, "exec") if tree.body else None
        final = None
        if isinstance(final_node, ast.Expr):
            final = _compile(ast.Expression(final_node.value), label, "eval")
    # As in IPython, all of a cell that awaits finds a running loop: it may make tasks first.
    awaits = any(code is not None and _is_coroutine(code) for code in (first, final))
    front.before(source)
    try:
        if first is not None:
            with around:
                _evaluate(first, namespace, in_loop=awaits)
        value = NOTHING
        if final is not None:
            with around:
                value = _evaluate(final, namespace, in_loop=awaits)
    finally:
        front.after()
    return value, value is not NOTHING and value is not None and not _is_quiet(source)


def _transform(body: str, label: str, above: int, front: Front) -> str:
    try:
        return front.transform(body)
    except SyntaxError as error:  # of a tokenizer, which knows neither the cell nor what is above
        error.filename = label
        error.lineno = above + (error.lineno or 1)
        raise error.with_traceback(None) from None


def remember(label: str, source: str) -> None:
    """Let tracebacks and ``inspect`` find the lines of a cell."""
    lines = source.splitlines(keepends=True)
    linecache.cache[label] = (len(source), None, lines, label)


def _evaluate(code: CodeType, namespace: dict[str, Any], *, in_loop: bool) -> Any:
    if _is_coroutine(code):
        return _run_async(eval(code, namespace))
    return _run_async(_evaluate_in_loop(code, namespace)) if in_loop else eval(code, namespace)


def _is_coroutine(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


async def _evaluate_in_loop(code: CodeType, namespace: dict[str, Any]) -> Any:
    return eval(code, namespace)


def _run_async(coroutine: Any) -> Any:
    """Run a cell that awaits, on a loop that all such cells share.

    ``asyncio.Runner`` turns SIGINT into a cancellation, but only if it finds Python's own handler.
    """
    global _runner, _awaiting
    if _runner is None:
        _runner = asyncio.Runner()
    ours = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # not in the main thread: nobody interrupts by signal there
        return _runner.run(coroutine)
    _awaiting = coroutine
    try:
        return _runner.run(coroutine)
    finally:
        _awaiting = None
        signal.signal(signal.SIGINT, ours)


def awaiting() -> object:
    """From any thread: the coroutine of a cell that awaits, while the main thread runs it."""
    return _awaiting


def _is_quiet(source: str) -> bool:
    """A cell that ends in a semicolon shows nothing, as in IPython."""
    if ";" not in source:
        return False
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT)
    last = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in skip:
                last = token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return source.rstrip().endswith(";")
    return last == ";"


def run_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    namespace: dict[str, Any],
    around: AbstractContextManager[None] = _NOTHING_AROUND,
) -> Any:
    """Call a function that came from the kernel.

    A function of the notebook arrives with copies of the notebook's globals that it names. Names
    that it uses and the notebook does not have (``rank``, ``device``, a model made in a cell) are
    looked up in the rank's namespace, and what it declares ``global`` is stored there.
    """
    borrowed = {}
    used = list(_main_globals(function, args, kwargs))
    for target, names in used:
        for name in names:
            if name not in target and name in namespace:
                target[name] = borrowed[name] = namespace[name]
    before = dict(borrowed)
    try:
        with around:
            value = function(*args, **kwargs)
            if inspect.iscoroutine(value):
                value = _run_async(value)
        return value
    finally:
        for target, _ in used:
            for name in _stored_globals(target, function):
                if name in target and target[name] is not before.get(name, NOTHING):
                    namespace[name] = target[name]


def rebound(function: FunctionType, namespace: dict[str, Any]) -> FunctionType:
    """The same function with other globals."""
    copy = FunctionType(
        function.__code__,
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy


def _main_globals(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """The globals of functions that came by value, each with the names that are used in it."""
    todo: list[Any] = [function, *args, *kwargs.values()]
    seen: set[int] = set()
    used: dict[int, tuple[dict[str, Any], set[str]]] = {}
    while todo:
        item = todo.pop()
        if isinstance(item, functools.partial):
            todo += [item.func, *item.args, *item.keywords.values()]
            continue
        if callable(item):
            item = getattr(item, "__func__", item)
            if hasattr(item, "__wrapped__"):
                item = inspect.unwrap(item)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):
            if item.__globals__.get("__name__") != "__main__":
                continue
            known = id(item.__globals__) in used
            _, names = used.setdefault(id(item.__globals__), (item.__globals__, set()))
            names |= _names(item.__code__)
            if not known:
                todo += [v for v in item.__globals__.values() if _is_code_holder(v)]
            todo += [c.cell_contents for c in item.__closure__ or () if _holds_code(c)]
        elif isinstance(item, type):
            if item.__module__ == "__main__":
                todo += [v for v in vars(item).values() if callable(v) or hasattr(v, "__func__")]
        elif type(item).__module__ == "__main__":
            todo.append(type(item))
    yield from used.values()


def _is_code_holder(value: Any) -> bool:
    return isinstance(value, (FunctionType, type, functools.partial))


def _holds_code(cell: Any) -> bool:
    try:
        return _is_code_holder(cell.cell_contents)
    except ValueError:
        return False


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _names(const)
    return names


def _stored_globals(target: dict[str, Any], function: Any) -> set[str]:
    """Names that functions with these globals declare ``global`` and assign."""
    stored: set[str] = set()
    functions = [f for f in (function, *target.values()) if isinstance(f, FunctionType)]
    for item in functions:
        if item.__globals__ is target:
            stored |= _stored(item.__code__)
    return stored


@functools.lru_cache(maxsize=256)
def _stored(code: CodeType) -> frozenset[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _stored(const)
    return frozenset(names)
