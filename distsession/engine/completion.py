"""Completion and inspection by a rank's variables, without running anything of the user's.

Nothing is called: no property, no ``__getattr__``, ``__dir__`` or ``__repr__``; ``names`` follows
names. A thread of its own answers, so that neither the main thread nor the control thread is held
up.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import keyword
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from distsession.engine.names import (
    Missing,
    children,
    find,
    has_own,
    is_foreign,
    module_type,
    require_stored,
)
from distsession.protocol.messages import CompletionReply, CompletionRequest

__all__ = ["CompletionServer", "complete", "describe", "handle_request"]

log = logging.getLogger(__name__)

MAX_COMPLETIONS = 500
"""How many completions are given."""

_EXPRESSION = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[(?:-?\d+|'[^'\[\]]*'|\"[^\"\[\]]*\")\])*"
_ATTRIBUTE = re.compile(rf"(?<![\w.\])'\"])(?P<base>{_EXPRESSION})\.(?P<prefix>\w*)$")
_KEY = re.compile(rf"(?<![\w.\])'\"])(?P<base>{_EXPRESSION})\[(?P<quote>['\"])(?P<prefix>[^'\"]*)$")
_NAME = re.compile(r"(?<![\w.])(?P<prefix>[A-Za-z_]\w*|)$")
_WORD = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w+")
_CALLEE = re.compile(rf"({_EXPRESSION})$")

Match = tuple[str, str]


class CompletionServer:
    """Answers questions one at a time; of those that come meanwhile, only the last.

    Args:
        namespace: The rank's variables.
        rank: Its number.
        send: Takes the answer, from another thread.
        settle: Called before the variables are looked at, by that thread.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        rank: int,
        send: Callable[[CompletionReply], None],
        settle: Callable[[], None] = lambda: None,
    ):
        self._namespace = namespace
        self._rank = rank
        self._send = send
        self._settle = settle
        self._newest: CompletionRequest | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, request: CompletionRequest) -> None:
        """From the control thread."""
        self._newest = request
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="distsession-completion", daemon=True
            )
            self._thread.start()

    def _serve(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            request, self._newest = self._newest, None
            if request is None:
                continue
            try:
                self._settle()
                self._send(handle_request(request, self._rank, dict(self._namespace)))
            except Exception:
                log.exception("could not answer %r", request)


def handle_request(
    request: CompletionRequest, rank: int, namespace: Mapping[str, Any]
) -> CompletionReply:
    """The answer to a question."""
    if request.inspect:
        return CompletionReply(rank, request.number, text=describe(request.code, namespace))
    start, matches = complete(request.code, namespace)
    return CompletionReply(rank, request.number, start, tuple(matches[:MAX_COMPLETIONS]))


# --- completion -----------------------------------------------------------------------------------


def complete(code: str, namespace: Mapping[str, Any]) -> tuple[int, list[Match]]:
    """Completions at the end of a piece of code.

    Returns:
        Where the text to be replaced begins, and texts and types of what may stand there.
    """
    line = code[code.rfind("\n") + 1 :]
    for pattern, matches in ((_ATTRIBUTE, _attributes), (_KEY, _keys)):
        found = pattern.search(line)
        if found is not None:
            prefix = found["prefix"]
            try:
                value = require_stored(find(found["base"], namespace))
            except Missing:
                return len(code), []
            return len(code) - len(prefix), matches(value, found)
    found = _NAME.search(line)
    if found is None or _is_in_text(line):
        return len(code), []
    prefix = found["prefix"]
    matches_: list[Match] = [*_parameters(code[: len(code) - len(prefix)], prefix, namespace)]
    if prefix:
        matches_ += _names(code, prefix, namespace)
    return len(code) - len(prefix), list({text: (text, kind) for text, kind in matches_}.values())


def _is_in_text(line: str) -> bool:
    rest = re.sub(r"\\.", "", line)
    return any(part[1] for part in re.finditer(r"'[^']*'|\"[^\"]*\"|(['\"#])", rest))


def _names(code: str, prefix: str, namespace: Mapping[str, Any]) -> Iterator[Match]:
    for name in sorted(namespace, key=lambda name: (name.startswith("_"), name)):
        if name.startswith(prefix):
            yield name, _kind(namespace[name])
    for name in sorted(set(_WORD.findall(code[: len(code) - len(prefix)]))):
        if name.startswith(prefix) and name not in namespace and not keyword.iskeyword(name):
            yield name, "statement"  # of this very cell
    for name in (*keyword.kwlist, *dir(builtins)):
        if name.startswith(prefix) and name not in namespace:
            yield name, "keyword" if name in keyword.kwlist else _kind(getattr(builtins, name))


def _attributes(value: Any, found: re.Match[str]) -> list[Match]:
    names: dict[str, Any] = {}
    if isinstance(value, ModuleType):
        names.update(vars(value))
    elif isinstance(value, type):
        for base in reversed(type.mro(value)):
            names.update(vars(base))
    else:
        for base in reversed(type.mro(type(value))):
            names.update(vars(base))
        with contextlib.suppress(AttributeError):
            names.update(object.__getattribute__(value, "__dict__"))
        names.update(children(value))
    prefix = found["prefix"]
    chosen = [
        name
        for name in names
        if name.startswith(prefix)
        and (prefix or not name.startswith("_"))
        and name.isidentifier()  # a Sequential has children "0", "1" and so on
        and not keyword.iskeyword(name)
    ]
    return [(name, _kind(names[name])) for name in sorted(chosen)]


def _keys(value: Any, found: re.Match[str]) -> list[Match]:
    if not has_own(value, "__iter__", (dict,)):
        return []
    prefix, end = found["prefix"], f"{found['quote']}]"
    keys = [key for key in list(value) if type(key) is str and key.startswith(prefix)]
    return [(key + end, "dict key") for key in keys if found["quote"] not in key]


def _parameters(before: str, prefix: str, namespace: Mapping[str, Any]) -> Iterator[Match]:
    """Names of parameters of the call that the cursor is in."""
    depth = 0
    for position in range(len(before) - 1, -1, -1):
        depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(before[position], 0)
        if depth < 0:
            break
    else:
        return
    callee = _CALLEE.search(before[:position])
    if before[position] != "(" or callee is None or before.rstrip()[-1] not in "(,":
        return
    try:
        signature = _signature(find(callee[1], namespace))
    except Missing:
        return
    for name, parameter in (signature.parameters if signature else {}).items():
        if name.startswith(prefix) and parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            yield f"{name}=", "param"


def _kind(value: Any) -> str:
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        return "function"
    if isinstance(value, (staticmethod, classmethod)) or inspect.isroutine(value):
        return "function"
    if isinstance(value, type):
        return "class"
    if isinstance(value, property):
        return "property"
    return "module" if isinstance(value, ModuleType) else "instance"


# --- inspection -----------------------------------------------------------------------------------


def describe(expression: str, namespace: Mapping[str, Any]) -> str:
    """What can be said about a name; empty if it is not there."""
    try:
        value = find(expression, namespace)
    except Missing:
        return ""
    lines = [f"Type:      {type(value).__name__}"]
    signature = _signature(value) if callable(value) else None
    if signature is not None:
        lines.insert(0, f"Signature: {expression.rpartition('.')[2]}{signature}")
    lines += _facts(value)
    source = _source(value)
    if source:
        lines.append(f"File:      {source}")
    documented = value if callable(value) or isinstance(value, (ModuleType, property)) else None
    text = _docstring(documented)
    return "\n".join(lines) + (f"\nDocstring:\n{text}" if text else "")


def _facts(value: Any) -> Iterator[str]:
    if is_foreign(value):
        yield f"Value:     {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        yield f"Device:    {value.device}"
    elif value is None or type(value) in (bool, int, float, complex, str, bytes):
        text = repr(value)
        yield f"Value:     {text if len(text) <= 200 else text[:197] + '...'}"
    elif has_own(value, "__len__", (dict, list, tuple, set, frozenset)):
        yield f"Length:    {len(value)}"


def _signature(value: Any) -> inspect.Signature | None:
    if not isinstance(value, type) and isinstance(value, module_type()):
        value = MethodType(type(value).forward, value)
    try:
        return inspect.signature(value)
    except Exception:  # a builtin without one, or an object that has its own idea of it
        return None


def _source(value: Any) -> str:
    code = getattr(inspect.unwrap(value), "__code__", None) if inspect.isroutine(value) else None
    if code is not None:
        return f"{code.co_filename}, line {code.co_firstlineno}"
    file = vars(value).get("__file__") if isinstance(value, ModuleType) else None
    return file if isinstance(file, str) else ""


def _docstring(value: Any) -> str:
    if value is None:
        return ""
    try:
        text = inspect.getattr_static(value, "__doc__", None)
        text = getattr(value, "__doc__", None) if not isinstance(text, str) else text
    except Exception:
        return ""
    return inspect.cleandoc(text) if isinstance(text, str) else ""
