"""Objects to frames and back: cloudpickle with its large buffers beside it.

A payload is a list of frames. The first is a pickle (protocol 5) made by cloudpickle, so that
lambdas, closures and classes of a notebook travel by value; the rest are the buffers that it
refers to (tensors, arrays), which are sent as they lie in memory.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import cloudpickle

from distsession.errors import SerializationError
from distsession.protocol.cells import is_notebook_file
from distsession.protocol.tensor_memory import RemoteBytes, in_memory
from distsession.protocol.unsendable import Unsendable, is_refused, unsendable

__all__ = [
    "Frames",
    "Lend",
    "Reducer",
    "dump_call",
    "dump_value",
    "imports_torch",
    "load",
    "use_reducer",
]

HEAD_BYTES = 1 << 20
"""Bytes of a pickle that are searched for the names of what it imports."""

Frames = list[Any]
"""The frames of one payload: bytes-like objects."""

Lend = Callable[[RemoteBytes], bytes | None]
"""Gives what stands for a frame that its receiver copies by itself; None if it is to be sent."""


class Reducer(Protocol):
    """How objects of one payload are pickled that cloudpickle would copy."""

    def __call__(self, obj: Any) -> Any:
        """What ``__reduce_ex__`` would give; NotImplemented leaves the object to cloudpickle."""

    def finish(self, buffers: Sequence[pickle.PickleBuffer], lend: Lend | None = None) -> list[Any]:
        """The memory of all buffers of the payload, once everything has been pickled.

        Some of it may be ``RemoteBytes``, or lent.
        """


class _Chunks(list[Any]):
    """A file to write to. The pickler hands large ``bytes`` over as they are; none is copied."""

    def write(self, data: Any) -> int:
        self.append(data)
        return len(data)


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: Any,
        buffers: list[Any],
        reducer: Reducer | None,
        files: set[str] | None,
        for_ranks: bool,
    ):
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._reducer = reducer
        self._files = files
        self._for_ranks = for_ranks

    def reducer_override(self, obj: Any) -> Any:
        if self._files is not None and isinstance(obj, FunctionType):
            file = obj.__code__.co_filename
            if is_notebook_file(file):
                self._files.add(file)
        if not self._for_ranks and is_refused(obj):
            raise Unsendable(type(obj).__name__)
        if self._reducer is not None:
            reduced = self._reducer(obj)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(obj)


def _dump(
    obj: Any,
    files: set[str] | None = None,
    may_be_remote: bool = False,
    lend: Lend | None = None,
    for_ranks: bool = False,
) -> Frames:
    chunks, buffers = _Chunks(), list[Any]()
    reducer = _reducer()
    _Pickler(chunks, buffers, reducer, files, for_ranks).dump(obj)
    memory = [b.raw() for b in buffers] if reducer is None else reducer.finish(buffers, lend)
    if not may_be_remote:
        memory = [in_memory(frame) for frame in memory]
    return [chunks[0] if len(chunks) == 1 else b"".join(chunks), *memory]


def _reducer() -> Reducer | None:
    """One for tensors, in a process that knows any."""
    return None if _make_reducer is None or "torch" not in sys.modules else _make_reducer()


_make_reducer: Callable[[], Reducer] | None = None


def use_reducer(make: Callable[[], Reducer]) -> None:
    """Have this process pickle with a reducer, a new one for each payload, once it knows torch."""
    global _make_reducer
    _make_reducer = make


def load(frames: Sequence[Any]) -> Any:
    """Rebuild the object of a payload. Runs whatever code its pickle names."""
    # What is rebuilt over a buffer can be written to only if the buffer can.
    buffers = (bytearray(f) if memoryview(f).readonly else f for f in frames[1:])
    return pickle.loads(frames[0], buffers=buffers)


def imports_torch(frames: Sequence[Any]) -> bool:
    """Whether to rebuild the object of a payload will import torch, which takes its time."""
    if "torch" in sys.modules or not frames:
        return False
    head = bytes(memoryview(frames[0])[:HEAD_BYTES])
    return b"torch" in head or b"distsession.engine.tensors" in head


def dump_value(
    value: Any,
    *,
    what: str,
    path: str = "",
    files: set[str] | None = None,
    named: bool = False,
    may_be_remote: bool = False,
    lend: Lend | None = None,
    for_ranks: bool = False,
) -> Frames:
    """Pickle one value.

    Args:
        value: Any object.
        what: How the error message calls it, such as ``"the result"``.
        path: Its name, if it has one: the message then calls the part at fault by its path, such
            as ``cfg.hooks[2]``.
        files: Gets what the notebook's functions within have for a file.
        named: It is a dictionary of values by their names, of which the message names one.
        may_be_remote: Frames may be ``RemoteBytes``, for who writes them to shared memory.
        lend: Is asked of those, for a receiver that copies them by itself.
        for_ranks: It is rebuilt on ranks, where what needs their process group may go.

    Raises:
        SerializationError: The value cannot be pickled; the message names the part at fault.
    """
    try:
        return _dump(value, files, may_be_remote, lend, for_ranks)
    except Exception as error:
        for name, part in value.items() if named else ():
            dump_value(part, what=name, path=name, for_ranks=for_ranks)
        raise _error(value, what, error, path) from None


def dump_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    files: set[str] | None = None,
) -> Frames:
    """Pickle a function with its arguments.

    Args:
        function: Any that can be called.
        args: Its arguments.
        kwargs: Those with a name.
        files: Gets what the notebook's functions have for a file: this one, and all that go along.

    Raises:
        SerializationError: One of them cannot be pickled; the message names it.
    """
    try:
        return _dump((function, tuple(args), dict(kwargs)), files)
    except Exception as whole:
        name = getattr(function, "__qualname__", repr(function))
        parts = [(f"the function {name}", function)]
        parts += [(f"argument {index} of {name}", arg) for index, arg in enumerate(args)]
        parts += [(f"argument {key}= of {name}", value) for key, value in kwargs.items()]
        for what, part in parts:
            try:
                _dump(part)
            except Exception as error:
                raise _error(part, what, error) from None
        raise _error(function, f"the call of {name}", whole) from None


def _error(obj: Any, what: str, error: Exception, name: str = "") -> SerializationError:
    chain = _find_culprit(obj)
    for path, part in chain:
        if (known := unsendable(part, f"{name}{path}" if name else "")) is not None:
            why, remedy = known
            text = f"{_place(what, name, path)}: {_kind(part)}{_at(name, path)}: {why}."
            return SerializationError(text, remedy=remedy)
    path, culprit = chain[-1]
    reason = str(error).strip() or type(error).__name__
    return SerializationError(
        f"{_place(what, name, path)}: {_kind(culprit)}{_at(name, path)}, {_size(culprit):,} bytes: "
        f"{reason}.",
        remedy="Make it on the rank instead, or leave it out of what is sent.",
    )


def _place(what: str, name: str, path: str) -> str:
    return f"{f'{name}{path}' if name else what} cannot be sent"


def _at(name: str, path: str) -> str:
    return f" (at {path})" if path and not name else ""


def _kind(obj: Any) -> str:
    cls = type(obj)
    name = (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
    return f"a {name}"


def _size(obj: Any) -> int:
    nbytes = getattr(obj, "nbytes", None)
    try:
        return nbytes if isinstance(nbytes, int) else sys.getsizeof(obj)
    except Exception:
        return 0


def _find_culprit(obj: Any, depth: int = 6) -> list[tuple[str, Any]]:
    """Walk down to the smallest part that cannot be pickled; gives all on the way, by path."""
    path = ""
    chain = [(path, obj)]
    for _ in range(depth):
        for step, part in _parts(obj):
            try:
                _dump(part)
            except Exception:
                path, obj = path + step, part
                chain.append((path, obj))
                break
        else:
            break
    return chain


def _parts(obj: Any) -> list[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        return [(f"[{key!r}]", value) for key, value in list(obj.items())[:1000]]
    if isinstance(obj, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(obj[:1000])]
    parts: list[tuple[str, Any]] = []
    closure = getattr(obj, "__closure__", None)
    if closure:
        for name, cell in zip(obj.__code__.co_freevars, closure, strict=False):
            try:
                parts.append((f" closure variable {name}", cell.cell_contents))
            except ValueError:  # a variable that is not bound yet
                continue
    code = getattr(obj, "__code__", None)
    if code is not None:
        names = [name for name in code.co_names if name in obj.__globals__]
        parts += [(f" global variable {name}", obj.__globals__[name]) for name in names]
        return parts
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        parts += [(f".{name}", value) for name, value in attributes.items()]
    return parts
