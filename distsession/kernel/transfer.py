"""Push, pull, scatter and gather: what is asked of the ranks, in which order."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from distsession.cluster.interrupts import interrupts_held
from distsession.errors import (
    DistsessionError,
    OptionsError,
    RunError,
    RunInterrupt,
    SessionStateError,
)
from distsession.kernel.cells import notebook_cells
from distsession.kernel.requests import Requests
from distsession.kernel.run import SET_ALREADY
from distsession.protocol import serialize
from distsession.protocol.messages import (
    CommitRequest,
    FillRequest,
    NotebookCell,
    PieceRequest,
    PullRequest,
    PushRequest,
    ReturnRequest,
    ShardsRequest,
)
from distsession.protocol.shared_memory import Segment, map_private, map_shared
from distsession.ranks import ranks_text
from distsession.results import RankResults

__all__ = ["Taken", "end_loan", "gather", "give", "prepare", "pull", "push", "scatter", "take"]

log = logging.getLogger(__name__)

PIECE_MIN, PIECE_MAX = 1 << 20, 16 << 20
"""Bytes of a piece of what a rank of another host gathers; in between a sixteenth of the whole."""


def prepare() -> None:
    """Have this process pickle tensors without copying them."""

    def make() -> serialize.Reducer:
        from distsession.engine.tensors import Tensors

        return Tensors()

    serialize.use_reducer(make)


# --- push -----------------------------------------------------------------------------------------


def push(requests: Requests, ranks: Sequence[int], values: Mapping[str, Any]) -> None:
    """Give every rank these variables; all of them, or where that fails none."""
    _check_names(values)
    if values:
        files = set[str]()
        payload = _dump(dict(values), files)
        _push_frames(requests, ranks, payload, notebook_cells(files))


def _check_names(names: Sequence[str] | Mapping[str, Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionsError(
                f"push() sets variables, and {name!r} is no name of one. A part of something that "
                'the ranks have is set in a cell: push(w=...), then execute("model.weight = w").'
            )


def _dump(values: dict[str, Any], files: set[str] | None = None) -> serialize.Frames:
    return serialize.dump_value(values, what="what is pushed", files=files, named=True)


def _push_frames(
    requests: Requests, ranks: Sequence[int], payload: Any, cells: tuple[NotebookCell, ...] = ()
) -> None:
    """Push a pickled dict, the same for all ranks, or for each rank its own."""
    channel, number, is_set = requests.channel, 0, False

    def make(given: int) -> PushRequest:
        nonlocal number
        number = given
        return PushRequest(given, cells, by_word=channel.commits_pushes)

    with requests.pushing:
        try:
            unable = requests.call(ranks, make, payload, verb="sending")
            with interrupts_held():
                is_set = not any(unable.values()) and channel.commit_push(number, ranks)
        except BaseException as error:
            if is_set and isinstance(error, KeyboardInterrupt):
                raise RunInterrupt(SET_ALREADY) from None
            _discard(requests, ranks)
            raise
        if not is_set:
            requests.call(ranks, lambda number: CommitRequest(number, True), [], steady=True)


def _discard(requests: Requests, ranks: Sequence[int]) -> None:
    """Ranks that hold already what is not wanted can let it go."""
    with suppress(DistsessionError):
        requests.post(ranks, lambda number: CommitRequest(number, False))


@dataclass(frozen=True)
class Taken:
    """Variables of one rank, on their way to others.

    What they share (an optimizer the parameters of its model) stays shared. The values pass through
    the kernel as they are, without being rebuilt there.

    Attributes:
        source: The rank that has them.
        names: Of the variables.
        payload: All of them.
        is_lent: What is large on a device is still there: it goes straight from one device to the
            other. The source may run nothing before that is done.
    """

    source: int
    names: tuple[str, ...]
    payload: serialize.Frames
    is_lent: bool


def take(requests: Requests, source: int, names: Sequence[str], *, lend: bool) -> Taken:
    """Pickle variables of a rank for others, which need not be there yet.

    Args:
        requests: Of the session.
        source: The rank that has them.
        names: Which.
        lend: What is large on a device is lent. All ranks are on the host of the source.

    Raises:
        RunError: A name is not there, or cannot be pickled.
    """
    wanted = tuple(names)
    payload = requests.fetch_frames(
        source, lambda number: PullRequest(number, wanted, lend=lend, for_ranks=True)
    )
    return Taken(source, wanted, payload, lend)


def give(requests: Requests, taken: Taken, ranks: Sequence[int]) -> None:
    """Set on ranks what was taken from another one."""
    if taken.is_lent:
        if _give_lent(requests, taken, ranks):
            return
        taken = take(requests, taken.source, taken.names, lend=False)
    _push_frames(requests, ranks, taken.payload)


def _give_lent(requests: Requests, taken: Taken, ranks: Sequence[int]) -> bool:
    """The same, with memory of the source's device lent to the others; whether it came about.

    No name is set before the source has said, when all have their copies, that it lent the same
    all the while: what is read of a process that has ended, or computes on, may be anything.
    """
    with requests.pushing:
        try:
            problems = requests.call(ranks, PushRequest, taken.payload, verb="sending")
            is_same = requests.call([taken.source], ReturnRequest, [])[taken.source]
        except BaseException:
            _discard(requests, ranks)
            end_loan(requests, taken)
            raise
        if is_same and not any(problems.values()):
            requests.call(ranks, lambda number: CommitRequest(number, True), [], steady=True)
            return True
        _discard(requests, ranks)
    why = next(filter(None, problems.values()), f"rank {taken.source} has run something meanwhile")
    log.info("%s goes through this host's memory: %s", ", ".join(taken.names), why)
    return False


def end_loan(requests: Requests, taken: Taken) -> None:
    """Nobody will read what a rank has lent."""
    if taken.is_lent:
        with suppress(DistsessionError):
            requests.post([taken.source], ReturnRequest)


# --- pull -----------------------------------------------------------------------------------------


def pull(requests: Requests, ranks: Sequence[int], names: Sequence[str]) -> RankResults[Any]:
    """Bring the values of names from every rank."""
    for name in names:
        if not isinstance(name, str):
            raise OptionsError(f'pull() takes names, such as pull("x"), not {name!r}.')
    if not names:
        raise OptionsError('pull() takes at least one name, such as pull("x").')
    try:
        results = requests.call(
            ranks, lambda number: PullRequest(number, tuple(names)), [], verb="bringing"
        )
    except RunError as error:
        error.results = _values(names, error.results)
        raise
    return _values(names, results)


def _values(names: Sequence[str], results: Mapping[int, Any]) -> RankResults[Any]:
    """What the ranks answered; of a single name its values alone."""
    assert isinstance(results, RankResults)
    is_one = len(names) == 1
    return RankResults(
        {rank: values[names[0]] if is_one else values for rank, values in results.items()},
        duration=results.duration,
    )


# --- scatter --------------------------------------------------------------------------------------


def scatter(
    requests: Requests,
    ranks: Sequence[int],
    name: str,
    value: Any,
    dim: int,
    sizes: Sequence[int] | None,
) -> None:
    """Split a value over the ranks."""
    _check_names([name])
    ends = _ends(_length(name, value, dim), len(ranks), dim, sizes)
    begins = [0, *ends[:-1]]

    def payload_of(begin: int, end: int) -> Callable[[], serialize.Frames]:
        # Made only when it is this rank's turn: of what has to be copied there is one part a time.
        return lambda: _dump({name: _part(value, dim, begin, end)})

    _push_frames(
        requests,
        ranks,
        {
            rank: payload_of(begin, end)
            for rank, begin, end in zip(ranks, begins, ends, strict=True)
        },
    )


def _length(name: str, value: Any, dim: int) -> int:
    if isinstance(value, (list, tuple, range)):
        if dim != 0:
            raise OptionsError(f"a {type(value).__name__} has dimension 0 alone, not dim={dim}.")
        return len(value)
    shape = getattr(value, "shape", None)
    if shape is None or not _is_array(value):
        raise OptionsError(
            f"scatter({name!r}, ...) splits a tensor, a numpy array, a list or a tuple, not a "
            f"{type(value).__name__}: push() gives it to every rank whole."
        )
    if not -len(shape) <= dim < len(shape):
        raise OptionsError(
            f"scatter({name!r}, ..., dim={dim}): it has {len(shape)} dimensions, "
            f"of shape {list(shape)}."
        )
    return int(shape[dim])


def _is_array(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def _ends(length: int, ranks: int, dim: int, sizes: Sequence[int] | None) -> list[int]:
    """Where the part of each rank ends; the first ones are larger by one if it does not come out
    even, as with ``torch.tensor_split``.
    """
    if sizes is None:
        each, more = divmod(length, ranks)
        sizes = [each + (number < more) for number in range(ranks)]
    elif len(sizes) != ranks or sum(sizes) != length or min(sizes, default=0) < 0:
        raise OptionsError(
            f"sizes={list(sizes)} gives {sum(sizes)} to {len(sizes)} ranks, and there are {ranks} "
            f"ranks and {length} along dim={dim}."
        )
    return [sum(sizes[: number + 1]) for number in range(ranks)]


def _part(value: Any, dim: int, begin: int, end: int) -> Any:
    if not hasattr(value, "shape"):
        return value[begin:end]
    dim = dim % len(value.shape)
    return value[(slice(None),) * dim + (slice(begin, end),)]


# --- gather ---------------------------------------------------------------------------------------


def gather(requests: Requests, ranks: Sequence[int], name: str, dim: int) -> Any:
    """Put the parts that ranks hold together in one piece of memory, written by the ranks."""
    shards = dict(requests.call(ranks, lambda number: ShardsRequest(number, name), []))
    kinds = {rank: shard.kind for rank, shard in shards.items()}
    if len(set(kinds.values())) > 1:
        raise SessionStateError(f"gather({name!r}): the ranks hold different things: {kinds}.")
    kind = next(iter(kinds.values()))
    if kind == "list":
        return [item for part in pull(requests, ranks, [name]).values() for item in part]
    if kind not in ("tensor", "array", "sharded"):
        raise SessionStateError(
            f"gather({name!r}) joins tensors, numpy arrays or lists, not what the ranks hold (a "
            f"{kind}): pull({name!r}) brings what each of them has."
        )
    dtypes = {rank: str(shard.dtype) for rank, shard in shards.items()}
    if len(set(dtypes.values())) > 1:
        raise SessionStateError(f"gather({name!r}): the dtypes differ: {dtypes}.")
    first = next(iter(shards.values()))
    if kind == "sharded":
        shape = _whole_of_shards(name, shards)
        at: dict[int, tuple[int, ...]] = {}
    else:
        shape, at = _whole_of_parts(name, {r: s.shape for r, s in shards.items()}, dim)
    with Segment([math.prod(shape) * first.dtype.itemsize]) as whole:
        whole.find_memory()
        found = requests.call(
            ranks, lambda number: FillRequest(number, name, shape, at), whole, verb="bringing"
        )
        apart = {rank: part for rank, part in found.items() if part is not None}
        if apart:
            (memory,) = map_shared(whole.descriptor, whole.sizes)
            _bring_parts(requests, apart, _over(memory, kind, first.dtype, shape))
            del memory
        (memory,) = map_private(whole.descriptor, whole.sizes)
    return _over(memory, kind, first.dtype, shape)


def _over(memory: Any, kind: str, dtype: Any, shape: Sequence[int]) -> Any:
    """A tensor or array over some memory."""
    if kind == "array":
        import numpy

        return numpy.frombuffer(memory, dtype).reshape(shape)
    from distsession.engine.tensors import over

    return over(memory, dtype, shape)


def _bring_parts(requests: Requests, parts: Mapping[int, Any], whole: Any) -> None:
    """Bring what ranks of other hosts have staged, in pieces: the whole is all that is here.

    Args:
        requests: Of the session.
        parts: Where the part of each belongs.
        whole: A tensor or array over the memory of all of it.
    """
    size = whole.dtype.itemsize
    limit = min(PIECE_MAX, max(PIECE_MIN, whole.nbytes // 16)) // size
    try:
        for rank, part in parts.items():
            for begin, shape in _pieces(part.shape, limit):
                piece = requests.call([rank], partial(PieceRequest, begin=begin, shape=shape), [])
                window = tuple(
                    slice(at + b, at + b + n)
                    for at, b, n in zip(part.at, begin, shape, strict=True)
                )
                whole[window] = piece[rank]
    finally:
        with suppress(DistsessionError):
            requests.post(list(parts), lambda number: PieceRequest(number, None))


def _pieces(shape: Sequence[int], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into blocks of a limited number of elements: where each begins, and its shape."""
    cut = 0
    while cut < len(shape) - 1 and math.prod(shape[cut + 1 :]) > limit:
        cut += 1
    if 0 in shape:
        return
    step = max(1, limit // math.prod(shape[cut + 1 :])) if shape else 1
    for outer in itertools.product(*map(range, shape[:cut])):
        for at in range(0, shape[cut], step) if shape else [0]:
            begin = (*outer, at, *(0,) * (len(shape) - cut - 1))[: len(shape)]
            rows = (min(step, shape[cut] - at),) if shape else ()
            yield begin, (*(1,) * cut, *rows, *shape[cut + 1 :])


def _whole_of_shards(name: str, shards: Mapping[int, Any]) -> tuple[int, ...]:
    shape: tuple[int, ...] = next(iter(shards.values())).shape
    held = sum(shard.elements for shard in shards.values())
    if held != math.prod(shape):
        raise SessionStateError(
            f"gather({name!r}): {ranks_text(list(shards))} hold {held:,} of its "
            f"{math.prod(shape):,} elements: ask all ranks of its mesh."
        )
    return shape


def _whole_of_parts(
    name: str, shapes: Mapping[int, tuple[int, ...]], dim: int
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """The shape of the whole, and where each rank's part begins in it."""
    first = next(iter(shapes.values()))
    if not -len(first) <= dim < len(first):
        raise OptionsError(
            f"gather({name!r}, dim={dim}): on {ranks_text(list(shapes)[:1])} it has {len(first)} "
            f"dimensions. pull({name!r}) brings what each rank has."
        )
    dim = dim % len(first)
    rests = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes.values()}
    if len(rests) > 1:
        listed = ", ".join(f"rank {rank}: {list(shape)}" for rank, shape in shapes.items())
        raise SessionStateError(
            f"gather({name!r}, dim={dim}): only the sizes along dim {dim} may differ ({listed})."
        )
    at: dict[int, tuple[int, ...]] = {}
    length = 0
    for rank, shape in shapes.items():
        at[rank] = (*(0,) * dim, length, *(0,) * (len(first) - dim - 1))
        length += shape[dim]
    return (*first[:dim], length, *first[dim + 1 :]), at
