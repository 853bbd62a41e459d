"""Groups of some of the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from distsession.distributed import rank_info
from distsession.distributed.validate import as_limit
from distsession.errors import OptionsError, ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["device_mesh", "get_group", "new_group", "resolve_group", "split_group"]

_of_ranks: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""For each world the groups made for lists of ranks."""


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """A process group of some of the ranks. Every rank of the world has to call it, in step.

    Args:
        ranks: Its members, by their ranks in the world. Default: all.
        **options: More for ``torch.distributed.new_group``: ``backend``, and ``timeout``, also in
            seconds.

    Returns:
        The group, for ``group=``. On a rank that is no member a mark with which every function
        here gives back what it is given. Without a process group the list itself, which works as
        a group of one, even if it is empty.

    Raises:
        OptionsError: ``ranks`` is not a list of different ranks of the world, or is empty.
    """
    chosen = list(range(rank_info.get_world_size())) if ranks is None else _checked(ranks)
    if not rank_info.is_initialized():
        return chosen
    if "timeout" in options:
        options["timeout"] = as_limit(options["timeout"])
    return dist.new_group(chosen, **options)


def resolve_group(group: Any) -> Any:
    """A process group for what users give: one, or a list of ranks.

    The group of a list is made at its first use, in which every rank of the world has to take
    part, and kept as long as the world is.

    Raises:
        OptionsError: It is neither.
    """
    if group is None or _is_group(group):
        return group
    if not isinstance(group, list | tuple | range):
        raise OptionsError(f"group={group!r} is neither a process group nor a list of ranks.")
    ranks = tuple(_checked(group, "group"))
    if not rank_info.is_initialized():
        return None
    made = _of_ranks.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        made[ranks] = dist.new_group(list(ranks))
    return made[ranks]


def split_group(num_groups: int, **options: Any) -> Any:
    """Split the world into groups of equal size; every rank has to call it, in step.

    Ranks that follow each other are together: of 4 ranks in 2 groups 0 and 1, and 2 and 3.

    Args:
        num_groups: How many groups.
        **options: More for ``torch.distributed.new_group``.

    Returns:
        The group to which this rank belongs; without a process group ``[0]``.

    Raises:
        OptionsError: The world cannot be split like this; the message has the sizes.
    """
    world_size = rank_info.get_world_size()
    if not _is_whole(num_groups) or num_groups < 1 or world_size % num_groups:
        raise OptionsError(
            f"split_group({num_groups!r}): {world_size} ranks cannot be split into {num_groups!r} "
            f"groups of equal size{_sizes(world_size, num_groups)}."
        )
    return _own_group(world_size // num_groups, options)


def get_group(group_size: int | None = None, **options: Any) -> Any:
    """Like :func:`split_group`, by the size of each group.

    Args:
        group_size: Ranks in each group. Default: all.
        **options: More for ``torch.distributed.new_group``.

    Returns:
        The group to which this rank belongs; without a process group ``[0]``.

    Raises:
        OptionsError: The world cannot be split like this; the message has the sizes.
    """
    world_size = rank_info.get_world_size()
    size = world_size if group_size is None else group_size
    if not _is_whole(size) or size < 1 or world_size % size:
        raise OptionsError(
            f"get_group({group_size!r}): {world_size} ranks cannot be split into groups of "
            f"{size!r}."
        )
    return _own_group(size, options)


def device_mesh(dims: Mapping[str, int] | None = None, /, **sizes: int) -> DeviceMesh:
    """A ``DeviceMesh`` over the world; every rank has to call it, in step.

    Args:
        dims: Size of each dimension by its name, the outermost first. One may be -1: what is left.
        **sizes: The same as keywords: ``device_mesh(data=2, model=-1)``.

    Returns:
        The mesh, of the type of :func:`device`.

    Raises:
        OptionsError: The sizes do not multiply to the world size; the message has them.
        ProcessGroupError: There is no process group.
    """
    shape = {**(dims or {}), **sizes}
    if not shape:
        raise OptionsError("device_mesh() needs its dimensions: device_mesh(data=2, model=2).")
    text = ", ".join(f"{name}={size!r}" for name, size in shape.items())
    if not all(map(_is_whole, shape.values())):
        raise OptionsError(f"device_mesh({text}): sizes are whole numbers.")
    world_size = rank_info.get_world_size()
    known = 1
    for size in shape.values():
        known *= size if size != -1 else 1
    free = [name for name, size in shape.items() if size == -1]
    if len(free) == 1 and known > 0 and world_size % known == 0:
        shape[free[0]] = world_size // known
        known = world_size
    if len(free) > 1 or known != world_size or any(size < 1 for size in shape.values()):
        raise OptionsError(f"device_mesh({text}) does not cover a world of {world_size} ranks.")
    if not rank_info.is_initialized():
        raise ProcessGroupError("a mesh needs a process group: call initialize() first.")
    from torch.distributed.device_mesh import init_device_mesh

    kind = rank_info.device().type
    return init_device_mesh(kind, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _own_group(size: int, options: dict[str, Any]) -> Any:
    """Every rank takes part in making every group; gives the one that it belongs to."""
    world_size, rank = rank_info.get_world_size(), rank_info.get_rank()
    own: Any = None
    for first in range(0, world_size, size):
        group = new_group(range(first, first + size), **options)
        if first <= rank < first + size:
            own = group
    return own


def _is_group(value: Any) -> bool:
    if not rank_info.is_available():
        return False
    if isinstance(value, int):
        return value == dist.GroupMember.NON_GROUP_MEMBER
    return isinstance(value, dist.ProcessGroup)


def _checked(ranks: Sequence[int], name: str = "ranks") -> list[int]:
    world_size = rank_info.get_world_size()
    if not isinstance(ranks, list | tuple | range) or not all(map(_is_whole, ranks)):
        raise OptionsError(f"{name}={ranks!r} is not a list of ranks.")
    chosen = list(ranks)
    bad = [rank for rank in chosen if not 0 <= rank < world_size]
    # Code that names ranks of a cluster job has to run in one process, too.
    grouped = rank_info.is_initialized()
    if grouped and bad:
        raise OptionsError(f"{name}={chosen}: the world has ranks 0 to {world_size - 1} only.")
    if (grouped and not chosen) or len(set(chosen)) < len(chosen):
        raise OptionsError(f"{name}={chosen}: a group has one rank at least, and none twice.")
    return chosen


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sizes(world_size: int, groups: object) -> str:
    if not isinstance(groups, int) or groups < 1:
        return ""
    least, more = divmod(world_size, groups)
    sizes = [least + 1] * more + [least] * (groups - more)
    return f" (they would be {', '.join(map(str, sizes))})" if len(sizes) <= 16 else ""
