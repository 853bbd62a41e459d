"""A rank's side of push, pull, scatter and gather."""

from __future__ import annotations

import ast
import difflib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from distsession.engine.execute import rebound
from distsession.errors import SerializationError
from distsession.protocol import serialize
from distsession.protocol.board import Board
from distsession.protocol.tensor_memory import BorrowError

__all__ = ["Part", "Shards", "Transfers"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shards:
    """What a rank holds of something that is spread over the ranks.

    Attributes:
        kind: ``"tensor"``, ``"array"``, ``"list"`` or ``"sharded"``; anything else is the name of
            a type that cannot be put together.
        dtype: torch's or numpy's.
        shape: Of this rank's part; of the whole, if ``kind`` is ``"sharded"``.
        elements: How many of the whole this rank writes.
    """

    kind: str
    dtype: Any = None
    shape: tuple[int, ...] = ()
    elements: int = 0


@dataclass(frozen=True)
class Part:
    """Where what a rank holds belongs in the whole.

    Attributes:
        at: Where it begins in each dimension.
        shape: Of the part.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]


class Transfers:
    """Moves values in and out of a namespace.

    Args:
        namespace: The variables of a rank.
        rank: Its number.
        board: Where the kernel may say that what was staged is to be set; None where it never does.
    """

    def __init__(self, namespace: dict[str, Any], rank: int, board: Board | None = None):
        self._namespace = namespace
        self._rank = rank
        self._board = board
        self._staged: dict[str, Any] = {}
        self._push = 0
        self._part: Any = None

    # --- pull -------------------------------------------------------------------------------------

    def pull(self, names: Sequence[str]) -> dict[str, Any]:
        """The values of names, which may be those of parts (``"model.weight"``)."""
        return {name: self.find(name) for name in names}

    def find(self, name: str) -> Any:
        """What a name stands for. Nothing is called or computed.

        Raises:
            NameError: There is no such variable.
            ValueError: It is no name.
        """
        try:
            node = ast.parse(name.strip(), mode="eval").body
        except SyntaxError:
            node = ast.Constant(0)
        return self._value(node, name)

    def _value(self, node: ast.AST, name: str) -> Any:
        match node:
            case ast.Name(id=variable):
                if variable not in self._namespace:
                    close = difflib.get_close_matches(variable, list(self._namespace), n=1)
                    meant = f". Did you mean: {close[0]!r}?" if close else ""
                    raise NameError(f"name {variable!r} is not defined{meant}")
                return self._namespace[variable]
            case ast.Attribute(value=inner, attr=attribute):
                return getattr(self._value(inner, name), attribute)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return self._value(inner, name)[key]
            case ast.Subscript(
                value=inner, slice=ast.UnaryOp(ast.USub(), ast.Constant(value=int(key)))
            ):
                return self._value(inner, name)[-key]
        raise ValueError(
            f"{name!r} is no name of a variable or of a part of one, such as model.weight or "
            "losses[-1]: an expression goes to session.evaluate() or %distributed."
        )

    # --- push -------------------------------------------------------------------------------------

    def stage(self, payload: Sequence[Any], push: int = 0) -> str:
        """Rebuild values, to be committed or discarded later.

        Args:
            payload: Of the push.
            push: Its number, if the kernel may commit it by a word on the board.

        Returns:
            Why not, where they have to come by another way, or why the board's word is not enough;
            empty if all is well.
        """
        self._forget_staged()
        try:
            self._staged = serialize.load(payload)
        except BorrowError as error:
            log.info("what rank %d was lent has to be sent: %s", self._rank, error)
            return str(error)
        except Exception as error:
            raise SerializationError(
                f"what was pushed cannot be rebuilt: {type(error).__name__}: {error}. A module "
                "that only the notebook has must be on sys.path of the ranks, too."
            ) from error
        if not push or self._board is None:
            return ""
        for name in self._staged:
            if _may_run_code(self._namespace.get(name)):
                return f"the end of what {name!r} was before may have to be stopped"
        self._push = push
        self._board.regions[self._rank].set_staged(push)
        return ""

    def commit(self, keep: bool) -> None:
        """Set the names to what was staged, or discard it.

        A function of a cell gets this rank's variables for its globals again.
        """
        if keep:
            self._set_staged()
        self._forget_staged()  # behind it: what is interrupted before is done again

    def commit_pushed(self) -> bool:
        """Set the names to what was staged if the board says so; whether it may still say so."""
        if not self._push:
            return False
        if self.is_pushed:
            self.commit(True)
        return self._push != 0

    @property
    def is_pushed(self) -> bool:
        """From any thread: what was staged is committed, and about to be set."""
        push = self._push
        return bool(push and self._board and self._board.is_push_committed(push))

    def _forget_staged(self) -> None:
        self._staged = {}
        if self._push:
            self._push = 0
            assert self._board is not None
            self._board.regions[self._rank].set_staged(0)

    def _set_staged(self) -> None:
        values = dict(self._staged)
        for name, value in values.items():
            if isinstance(value, FunctionType) and value.__module__ == "__main__":
                for known, used in value.__globals__.items():
                    self._namespace.setdefault(known, used)
                values[name] = rebound(value, self._namespace)
        self._namespace.update(values)

    # --- gather -----------------------------------------------------------------------------------

    def shards(self, name: str) -> Shards:
        """Which part of the whole this rank has."""
        value = self.find(name)
        torch = sys.modules.get("torch")
        numpy = sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            if hasattr(value, "full_tensor"):
                from distsession.engine.sharded import elements

                return Shards("sharded", value.dtype, tuple(value.shape), elements(value))
            if value.layout != torch.strided or value.is_quantized or value.is_nested:
                return Shards(f"{type(value).__name__} that is quantized, nested or sparse")
            return Shards("tensor", value.dtype, tuple(value.shape), value.numel())
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.dtype.hasobject:
                return Shards("numpy array of Python objects")
            return Shards("array", value.dtype, value.shape, value.size)
        if isinstance(value, list):
            return Shards("list", None, (len(value),), len(value))
        return Shards(type(value).__name__)

    def fill(self, name: str, shape: Sequence[int], at: Sequence[int] | None, whole: Any) -> int:
        """Write this rank's part into the whole; gives its bytes.

        Args:
            name: Of the part.
            shape: Of the whole.
            at: Where the part begins; None for a sharded tensor, which knows.
            whole: Memory for all of it.
        """
        value = self.find(name)
        if at is None:
            from distsession.engine.sharded import elements, write

            write(value, _tensor_over(whole, value.dtype, shape))
            return elements(value) * int(value.dtype.itemsize)
        window = tuple(slice(a, a + n) for a, n in zip(at, value.shape, strict=True))
        if type(value).__module__.partition(".")[0] == "numpy":
            import numpy

            numpy.frombuffer(whole, value.dtype).reshape(shape)[window] = value
        else:
            from distsession.engine import pinned

            pinned.copy_to_host(_tensor_over(whole, value.dtype, shape)[window], value.detach())
        return int(value.nbytes)

    def stage_part(self, name: str, at: Sequence[int] | None) -> Part | None:
        """Keep this rank's part, of which pieces will be asked for; None if there is none.

        Args:
            name: Of the part.
            at: Where the part begins; None for a sharded tensor, which knows.
        """
        self._part = None
        value = self.find(name)
        if at is None:
            from distsession.engine.sharded import part

            found = part(value)
            if found is None:
                return None
            at, value = found
        self._part = value.detach() if hasattr(value, "detach") else value
        return Part(tuple(at), tuple(value.shape))

    def piece(self, begin: Sequence[int] | None, shape: Sequence[int]) -> Any:
        """A piece of the part that was staged; where it is to begin nowhere, forget the part."""
        if begin is None:
            self._part = None
            return None
        piece = self._part[tuple(slice(a, a + n) for a, n in zip(begin, shape, strict=True))]
        return piece.contiguous() if hasattr(piece, "contiguous") else piece


def _may_run_code(value: Any) -> bool:
    """Whether the end of a value may run Python code, which may hang."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        return bool(value.__dict__) or value.grad_fn is not None
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and type(value) is numpy.ndarray
    return not (is_array and not value.dtype.hasobject)


def _tensor_over(memory: Any, dtype: Any, shape: Sequence[int]) -> Any:
    from distsession.engine.tensors import over

    return over(memory, dtype, shape)
