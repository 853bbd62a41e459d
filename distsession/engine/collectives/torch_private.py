"""Everything that we touch of torch.distributed without its being public.

One function for each liberty taken, so that a new torch that breaks one is mended here.
``tests/integration/test_torch_internals.py`` fails when torch (2.13) changes one of them.
The file is long so that a new torch is checked against one file alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distsession.engine import host_info
from distsession.engine.collectives import abort, torch_changes
from distsession.engine.collectives.torch_changes import Part
from distsession.engine.listeners import RequestListener, is_run
from distsession.engine.store import Store
from distsession.protocol.messages import Request

__all__ = [
    "BACKEND",
    "GLOO",
    "CppWarnings",
    "ProfiledReceive",
    "Recipe",
    "abort_backends",
    "backend_classes",
    "begin_group_count",
    "bind_to_current_device",
    "boxed",
    "current_stream",
    "follow_groups",
    "follow_new_groups",
    "forget_groups",
    "graph_classes",
    "has_succeeded",
    "has_value",
    "hide_from_compiler",
    "install_group_factory",
    "install_rendezvous",
    "is_accelerator_used",
    "is_known",
    "is_making_groups",
    "is_stream_capturing",
    "leave_groups_to_torch",
    "lift_time_limits",
    "make_backend_group",
    "make_native_group",
    "native_backends",
    "native_groups",
    "note_within",
    "prepare_ranks",
    "put_back_default",
    "put_in_place",
    "refresh_data_parallel",
    "refresh_modules",
    "refuse_groups",
    "replace_init_process_group",
    "runs_in_order",
    "set_group_count",
    "set_store",
    "symmetric_memory_functions",
    "time_limit",
    "uses_torchcomms",
    "warn_of_fsdp2",
]

BACKEND = "distsession"
"""Name under which torch knows our process groups; ``get_backend()`` still says ``gloo``."""

LAZY_INIT = "TORCH_GLOO_LAZY_INIT"
"""With it, members connect to each other only when they first need to."""

Maker = Callable[..., Any]

_PRINTS_OF_PEERS = host_info.torch_release() < (2, 11)
_LINE_OF_GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\..*\n")

_ADDS_IN_FSDP2 = host_info.torch_release() < (2, 9)

NOT_OURS = ("fake", "mpi", "threaded")
"""Backends whose groups stay torch's own: two that connect nobody, and one that makes a group once
in the life of a process."""

COUNTS_FROM_ZERO = (
    "_set_sequence_number_for_group" not in c10d._new_process_group_helper.__code__.co_names
)
"""Backends count operations from 0 on every rank, and warn if told from where (torch 2.15)."""

_is_native = False
_refusal: Exception | None = None
"""What is raised where a group of ours is to be used to make another one."""
_is_making = False
"""A group within one of ours is made, for which the outer one's name is free for a while."""
_is_sorting = False
"""Whether standard output is looked through for gloo's line."""


@dataclass(frozen=True)
class Recipe:
    """How torch was asked for a group: what it takes to make its connections anew.

    Attributes:
        backend: As given, such as ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.
        options: Of the backend; None for its own defaults.
        device_id: The device whose communicator is made at once; None to make each when it is first
            used.
    """

    backend: str
    options: Any = None
    device_id: torch.device | None = None

    @property
    def backends(self) -> dict[str, str]:
        """The backend of each device type."""
        return dict(_backends(self.backend))

    @property
    def is_gloo(self) -> bool:
        """Whether nothing but gloo is in it."""
        return set(self.backends.values()) == {"gloo"}


GLOO = Recipe("gloo")


@functools.cache
def _backends(name: str) -> Mapping[str, str]:
    devices: Mapping[str, str] = c10d.BackendConfig(dist.Backend(name)).get_device_backend_map()
    return devices


_signature = functools.cache(inspect.signature)
"""Of a function of torch's. It takes as long as all else that a group does in Python."""


def install_group_factory(
    make: Callable[[Any, Recipe], Any],
    agree: Callable[[Sequence[int] | None, Any, timedelta | None], None],
    name: Callable[[Sequence[int]], str],
) -> None:
    """Let this function make every group of this process, whoever asks for it.

    torch lets a registered backend return a ``ProcessGroup`` of its own, which then stands for the
    group everywhere; but only under the backend's own name. ``_new_process_group_helper``, through
    which every group is made, is told that name, and the world's tables are told the one that was
    asked for, so that ``new_group()`` and ``monitored_barrier()`` go on as ever.

    Args:
        make: Gets torch's ``_DistributedBackendOptions`` and how the group was asked for. What it
            returns says in ``devices`` which it is for; that is set here.
        agree: Called on every rank before a new group is made that all ranks have to make; gets
            its members, or None for all, the group whose members make it, or None for all, and
            its time limit, or None for torch's own.
        name: Names a group that its members make alone, from its members.
    """
    if BACKEND.upper() in dist.Backend._plugins:
        return
    recipes: list[Recipe] = []
    dist.Backend.register_backend(
        BACKEND,
        lambda options, _: make(options, recipes[-1]),
        extended_api=True,
        devices=["cpu", "cuda"],
    )
    native = c10d._new_process_group_helper
    signature = _signature(native)

    def helper(*args: Any, **kwargs: Any) -> Any:
        _check_refusal()
        bound = signature.bind(*args, **kwargs)
        asked = dist.Backend(str(bound.arguments["backend"]))
        if _is_native or set(c10d.BackendConfig(asked).get_device_backend_map().values()) & {
            *NOT_OURS
        }:
            return native(*args, **kwargs)
        device_id = bound.arguments.get("device_id")
        recipe = Recipe(str(asked), bound.arguments.get("backend_options"), device_id)
        bound.arguments["backend"] = dist.Backend(BACKEND)
        bound.arguments["device_id"] = None  # it is for what is within, which connects at once
        recipes.append(recipe)
        try:
            with _without_splits():
                group, store = native(*bound.args, **bound.kwargs)
        finally:
            recipes.pop()
        if isinstance(group, dist.ProcessGroup):
            group.devices = [torch.device(d) for d in recipe.backends]  # type: ignore[attr-defined]
            inner = getattr(group, "inner", None)  # which may have chosen a device by itself
            group.bound_device_id = device_id or getattr(inner, "bound_device_id", None)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (asked, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
        return group, store

    _disable_dynamo(helper)
    c10d._new_process_group_helper = helper
    new_group = c10d._new_group_with_tag
    group_signature = _signature(new_group)

    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = group_signature.bind(*args, **kwargs)
        asked = bound.arguments
        is_local = asked.get("use_local_synchronization") or asked.get("pg_tag")
        if is_local or _is_native:
            return new_group(*args, **kwargs)
        agree(asked.get("ranks"), _makers[-1] if _makers else None, asked.get("timeout"))
        if not _makers:
            return new_group(*args, **kwargs)
        # The other ranks do not count this one, so it may not take its name from that count.
        asked["use_local_synchronization"] = True
        made = new_group(*bound.args, **bound.kwargs)
        return dist.GroupMember.NON_GROUP_MEMBER if made is None else made

    _disable_dynamo(checked)
    c10d._new_group_with_tag = checked
    hashed = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: hashed(ranks) if _is_native else name(ranks)
    native_name = c10d._process_group_name

    def process_group_name(ranks: Any, use_hashed_name: Any) -> Any:
        """From torch 2.15 on, a group counts also where its name does not need that.

        Its members alone count it then, and name all later groups differently from other ranks.
        """
        count = c10d._world.group_count
        found = native_name(ranks, use_hashed_name)
        if use_hashed_name and not _is_native:
            c10d._world.group_count = count
        return found

    _disable_dynamo(process_group_name)
    c10d._process_group_name = process_group_name
    _record_within()
    _disable_dynamo(c10d._hash_ranks_to_str)
    _divide_groups()
    _batch_messages()
    _end_coalescing()
    _follow_limits()
    _keep_forward_work()
    _log_backends()
    _know_within()


class _RanksOfGroups(dict[Any, dict[int, int]]):
    """Also those of groups within ours, which are in none of torch's tables."""

    def __missing__(self, group: Any) -> dict[int, int]:
        return _within[group]


_within: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def _know_within() -> None:
    """Let torch find who the members of a group within ours are.

    Where it simulates all ranks in one (``LocalTensorMode``), it asks so in each operation.
    """
    known = getattr(c10d, "_pg_group_ranks", None)
    if isinstance(known, dict):
        setattr(c10d, "_pg_group_ranks", _RanksOfGroups(known))  # noqa: B010 - not public


def note_within(group: Any, ranks: Sequence[int]) -> None:
    """That group is within one of ours, which has these members in the default group."""
    _within[group] = {rank: place for place, rank in enumerate(ranks)}


def _log_backends() -> None:
    """Make DDP's logging data name the backend and its settings, as with torch's own group.

    The logger is C++. It asks a group that says ``gloo`` for its backend of gloo, which ours has
    within.
    """
    kind, name = torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data"
    native = getattr(kind, name, None)
    if native is None:
        return

    def logging_data(module: Any) -> Any:
        data = native(module)
        if data.get("backend_name") == BACKEND:
            backend = module.process_group.name()
            data["backend_name"] = backend
            for variable in _LOGGED:
                key = variable.removeprefix("TORCH_").lower()
                if key.startswith(f"{backend}_"):
                    data[key] = os.environ.get(variable, "N/A")
            gloo = module.process_group._get_backend(torch.device("cpu"))
            threads = getattr(getattr(gloo, "options", None), "_threads", None)
            if backend == "gloo" and threads is not None:  # the part that compares has none
                data["gloo_num_threads"] = threads
        return data

    put_in_place(kind, name, logging_data)


_LOGGED = (
    "GLOO_DEVICE_TRANSPORT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_IB_TIMEOUT",
    "NCCL_NTHREADS",
    "NCCL_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
)
"""Variables that DDP's logger says with their backend, in lower case."""


def _record_within() -> None:
    """Let torch's flight recorder follow the groups within ours.

    From torch 2.15 on it hooks into each new group. It needs a backend that is registered in C++,
    which ours do not have.
    """
    native = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if native is None:
        return

    def attach(group: Any, config: Any, ranks: list[int]) -> None:
        if not hasattr(group, "inner"):
            native(group, config, ranks)
        elif group._device_types:  # it was split; the others' were hooked into as they were made
            native(group.inner, config, ranks)
            _keep_recorded(group, group.inner)

    setattr(c10d, "_maybe_attach_flight_recorder", attach)  # noqa: B010 - torch before 2.15 has none


def _keep_recorded(outer: Any, inner: Any) -> None:
    """Let a group within ours be recorded as long as it is that; torch would keep it for ever."""
    hooks = getattr(c10d._world, "pg_flight_recorder_hooks", {})
    outer.recording = hooks.pop(inner, None)


def _keep_forward_work() -> None:
    """Let the handle that a reducer waits for live as long as the reducer has it.

    Where C++ alone holds a handle that is written in Python, pybind11 no longer finds its methods.
    The base class's ``wait`` runs then, which nothing ends. What C++ gets from a group, and what
    ``_register_work`` gets, torch itself keeps; what ``DDP.join`` gives to its reducer it does not.
    """
    kind, name = dist.Reducer, "_set_forward_pass_work_handle"
    native = getattr(kind, name, None)
    if native is None:
        return
    kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def keep(reducer: Any, work: Any, *more: Any, **options: Any) -> None:
        native(reducer, work, *more, **options)
        kept[reducer] = work

    put_in_place(kind, name, keep)


def boxed(wait: Callable[..., bool], native: Callable[[], Any]) -> Any:
    """A handle of ours as a script object, which keeps what it waits with.

    Args:
        wait: Of the handle.
        native: Its own way, for a torch that has no work around a function of Python.
    """
    kind = getattr(torch._C._distributed_c10d, "PythonCallbackWork", None)
    return native() if kind is None else kind(wait).boxed()


class ProfiledReceive:
    """Shows a profiler a receive from any rank as torch's own is shown.

    Args:
        tensors: In which it receives.
    """

    __slots__ = ("_over",)

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._over: torch.futures.Future[None] | None = None
        if torch.autograd._profiler_enabled():
            with torch._C._profiler._RecordFunctionFast("c10d::recv_any_source_", [*tensors]):
                pass
            enter = torch.autograd._record_function_with_args_enter
            shown, self._over = enter("gloo:recvAnySource", *tensors), torch.futures.Future()
            # Before torch 2.12 only what this attaches can end it from another thread.
            torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(shown, self._over)

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Within, nothing is shown: it would be the same receive, from the rank that was found."""
        if self._over is None:
            yield
            return
        torch.autograd._enable_record_function(False)
        try:
            yield
        finally:
            torch.autograd._enable_record_function(True)

    def end(self) -> None:
        """It is over."""
        over, self._over = self._over, None
        if over is not None:  # in a thread of its own, as gloo's, which makes it asynchronous
            end: Callable[[None], None] = over.set_result
            thread = threading.Thread(target=end, args=(None,), name="distsession-profiled")
            thread.start()
            thread.join()


_makers: list[Any] = []
"""The group whose members alone make new groups just now, if there is one."""


def _divide_groups() -> None:
    """Let the members of a group divide it into smaller ones, while no other rank does so."""
    native = c10d.new_subgroups
    signature = _signature(native)

    @functools.wraps(native)
    def divided(*args: Any, **kwargs: Any) -> Any:
        new_subgroups: Any = native
        group = signature.bind(*args, **kwargs).arguments.get("group")
        if group is None or group is dist.group.WORLD or not isinstance(group, dist.ProcessGroup):
            return new_subgroups(*args, **kwargs)
        _makers.append(group)
        try:
            return new_subgroups(*args, **kwargs)
        finally:
            _makers.pop()

    _disable_dynamo(divided)
    dist.new_subgroups = c10d.new_subgroups = divided


def _follow_limits() -> None:
    """Let our groups hear of another time limit, which torch tells the backends within alone."""
    native = getattr(c10d, "_set_pg_timeout", None)
    if native is None:
        return

    @functools.wraps(native)
    def set_limit(timeout: timedelta, group: Any = None) -> None:
        native(timeout, group)
        ours: Any = dist.group.WORLD if group is None else group
        if hasattr(ours, "set_limit"):
            ours.set_limit(timeout)

    _disable_dynamo(set_limit)
    c10d._set_pg_timeout = set_limit


def _batch_messages() -> None:
    """Let ``batch_isend_irecv`` put messages together in our groups as it does in torch's own.

    It asks whether a group is of the very class ``ProcessGroup``, and issues one after the other
    where it is not, which on NCCL waits for peers that wait for others.
    """
    native = c10d.batch_isend_irecv

    @functools.wraps(native)
    def batched(p2p_op_list: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group: Any = p2p_op_list[0].group or dist.group.WORLD
        device = p2p_op_list[0].tensor.device
        if not hasattr(group, "coalesces") or not group.coalesces(device):
            return native(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as together:
            for each in p2p_op_list:
                end = "group_dst" if each.op is dist.isend else "group_src"
                each.op(each.tensor, group=each.group, tag=each.tag, **{end: each.group_peer})
        return list(together.works)

    _disable_dynamo(batched)
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batched


def _end_coalescing() -> None:
    """Let a block that puts operations together end where an error leaves it.

    torch leaves it open: each later operation of the group is put into it, and never done.
    """
    if not hasattr(c10d, "_coalescing_manager"):
        return
    native = c10d._coalescing_manager

    @contextlib.contextmanager
    def manager(
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Iterator[Any]:
        used: Any = group or c10d._get_default_group()
        if used in c10d._world.pg_coalesce_state:  # a block within another of the same group
            with native(used, device, async_ops) as together:
                yield together
            return
        try:
            with native(used, device, async_ops) as together:
                yield together
        except BaseException:
            c10d._world.pg_coalesce_state.pop(used, None)
            if device is not None and hasattr(used, "leave_coalescing"):
                used.leave_coalescing(torch.device(device))
            raise

    _disable_dynamo(manager)
    dist._coalescing_manager = c10d._coalescing_manager = manager


def hide_from_compiler() -> None:
    """Let ``torch.compile`` leave the code of ``engine`` alone, and what that calls.

    Within compiled code, C++ calls our groups, as DistributedDataParallel's reducer does, a
    ``print`` calls our streams and a signal calls our handler. dynamo would try to compile each
    frame of theirs: it fails on a group, and what it logs while our stream holds its lock would
    never be written. ``torch._dynamo.disable`` wraps every function and imports dynamo, which takes
    as long as a session's start; what it sets in the end can be set without it, for the code as
    such, so that calls cost what they did.
    """
    if not torch_changes.is_usable(Part.COMPILER):
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("distsession.engine."):
            for member in list(vars(module).values()):
                if getattr(member, "__module__", "") == name:
                    _disable_dynamo(member)


def prepare_ranks() -> None:
    """Do here what each process that is forked from this one would do, and find the same.

    What a rank looks at or frees, it writes to, if only to a count of references; and for each page
    that it writes to it takes longer than this process does, as it gets a copy.
    """
    torch_changes.sentences()
    for function in (c10d._new_process_group_helper, c10d._new_group_with_tag):
        _signature(function)
    for module in (torch.cuda, getattr(torch, "accelerator", torch.cuda)):
        _graph_classes_of(module)  # not of the device: to ask for it can spoil a fork
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:  # as init_process_group does
        with contextlib.suppress(Exception):
            rules.clear_lru_cache()


def _disable_dynamo(member: Any) -> None:
    """For a function, or all methods of a class."""
    if isinstance(member, type):
        for method in list(vars(member).values()):
            _disable_dynamo(getattr(method, "fget", None) or getattr(method, "__func__", method))
    elif inspect.isfunction(member) and torch_changes.is_usable(Part.COMPILER):
        member._torchdynamo_disable = True  # type: ignore[attr-defined]  # who would inline it
        plain = inspect.unwrap(member) if hasattr(member, "__wrapped__") else member
        _skip_frames(plain.__code__, *_skipping())


@functools.cache
def _skipping() -> tuple[Callable[[CodeType, Any], None], Any]:
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    return eval_frame.set_code_exec_strategy, eval_frame._FrameExecStrategy(skip, skip)


def _skip_frames(code: CodeType, follow: Callable[[CodeType, Any], None], how: Any) -> None:
    follow(code, how)
    for part in code.co_consts:
        if isinstance(part, CodeType):  # a function within it
            _skip_frames(part, follow, how)


def install_rendezvous(meet: Callable[[str, int, int, int, timedelta, bool], Any]) -> None:
    """Let this function give the store at which ranks meet that name a host and a port.

    Everything that does so comes to ``_create_c10d_store``: ``env://`` and ``tcp://``, for process
    groups and for RPC.

    Args:
        meet: Gets the host, the port, the rank, the world size, the time limit, and whether libuv
            is asked for. Where it gives None, torch's own way is gone, with a store that rank 0
            holds.
    """
    if not torch_changes.is_usable(Part.RENDEZVOUS):
        return
    module: Any = sys.modules["torch.distributed.rendezvous"]  # its name is that of a function, too
    native = module._create_c10d_store

    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        if not _is_native and 0 <= port < 2**16:  # others torch refuses
            uses_libuv = bool(more[0] if more else options.get("use_libuv", True))
            met = meet(hostname, port, rank, world_size, timeout, uses_libuv)
            if met is not None:
                return met
        is_of_agent = module._torchelastic_use_agent_store
        module._torchelastic_use_agent_store = lambda: False  # it has a store for this world alone
        try:
            return native(hostname, port, rank, world_size, timeout, *more, **options)
        finally:
            module._torchelastic_use_agent_store = is_of_agent

    module._create_c10d_store = create


def follow_groups(on_default: Callable[[Any], None], on_end: Callable[[str], None]) -> None:
    """Let these functions hear of it when code puts a default group in place, or ends groups.

    Args:
        on_default: Gets the default group from now on, or None.
        on_end: Gets the name of a group that is gone from torch's tables; empty for all of them.
    """
    world: Any = type(c10d._world)
    default: Any = vars(world).get("default_pg")
    if isinstance(default, property) and default.fset is not None:
        native_setter = default.fset

        def set_default(self: Any, group: Any) -> None:
            native_setter(self, group)
            if not _is_native:
                on_default(group)

        _disable_dynamo(set_default)
        world.default_pg = default.setter(set_default)
    module: Any = c10d
    ends = getattr(module, "_unregister_process_group", None)
    ends_all = getattr(module, "_unregister_all_process_groups", None)
    if ends is None or ends_all is None:
        return

    def end(name: str) -> None:
        ends(name)
        if not (_is_native or _is_making):
            on_end(name)

    def end_all() -> None:
        ends_all()
        if not _is_native:
            on_end("")

    for function in (end, end_all):
        _disable_dynamo(function)
    module._unregister_process_group, module._unregister_all_process_groups = end, end_all


def follow_new_groups(on_group: Callable[[Any, Sequence[int]], None]) -> None:
    """Let this function hear of each group that torch makes from here on.

    torch (2.15) attaches its own recorder to each group as soon as the group has its name.

    Args:
        on_group: Gets the group, and its members' ranks within the default group.
    """
    native = c10d._maybe_attach_flight_recorder  # type: ignore[attr-defined]

    def attach(group: Any, config: Any, ranks: list[int]) -> None:
        native(group, config, ranks)
        if not {*config.get_device_backend_map().values()} & {*NOT_OURS} and _refusal is None:
            on_group(group, ranks)

    _disable_dynamo(attach)
    setattr(c10d, "_maybe_attach_flight_recorder", attach)  # noqa: B010 - as in _record_within


def time_limit(group: Any) -> float:
    """The time limit of a native group's operations, in seconds."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            limit: timedelta = group._get_backend(device).options._timeout
            return limit.total_seconds()
    return c10d.default_pg_timeout.total_seconds()


def is_known(group: Any) -> bool:
    """Whether torch has a group in its tables: it has not been destroyed."""
    return group in c10d._world.pg_map


def put_back_default(group: Any) -> None:
    """Make a group that torch knows the default one again, and end that which has its place."""
    other = dist.group.WORLD
    c10d._update_default_pg(group)
    if other is not None and other is not group and is_known(other):
        dist.destroy_process_group(other)


def forget_groups() -> None:
    """Destroy what is left in torch's tables, where code has put the default group away."""
    groups = list(c10d._world.pg_map)
    if not groups and c10d._world.pg_names:  # code has emptied a part of the tables
        for table in _TABLES:
            getattr(c10d._world, table, {}).clear()
        c10d._unregister_all_process_groups()
    if groups and not dist.is_initialized():
        c10d._update_default_pg(groups[0])
    if dist.is_initialized():
        dist.destroy_process_group()


def replace_init_process_group(wrap: Callable[[Any], Any]) -> None:
    """Let user code call another function, which is made from torch's own."""
    dist.init_process_group = c10d.init_process_group = wrap(c10d.init_process_group)


@contextlib.contextmanager
def native_groups() -> Iterator[None]:
    """Let torch make its own gloo groups for a while."""
    global _is_native
    before, _is_native = _is_native, True
    try:
        yield
    finally:
        _is_native = before


def leave_groups_to_torch() -> None:
    """From here on torch makes its own gloo groups, and nothing else is done to them."""
    global _is_native
    _is_native = True


def refuse_groups(error: Exception) -> None:
    """From here on no group is made beside a default group that is one of ours."""
    global _refusal
    _refusal = error


def _check_refusal() -> None:
    default: Any = dist.group.WORLD
    if _refusal is not None and default is not None and hasattr(default, "members"):
        raise _refusal


def make_backend_group(
    recipe: Recipe,
    store: dist.Store,
    outer: dist.ProcessGroup,
    members: Sequence[int],
    timeout: timedelta,
    *,
    is_world: bool,
) -> dist.ProcessGroup:
    """A group of torch's own, of any backend, that is in none of the world's tables.

    torch makes it as it makes every group. What it writes into its tables is taken out again, and
    while it does, the outer group is not in them, so that both can have one name. Its communicator
    is always a new one, see ``_without_splits``.

    Args:
        recipe: How the outer group was asked for.
        store: With a prefix of its own.
        outer: The group that user code holds.
        members: Ranks of the world.
        timeout: Of each operation.
        is_world: It is the default group's.
    """
    global _is_making
    world, name = c10d._world, outer.group_name
    tables = [getattr(world, table) for table in _TABLES if hasattr(world, table)]
    before = [dict(table) for table in tables]
    tagged = {tag: list(groups) for tag, groups in world.tags_to_pg.items()}
    is_named = outer in world.pg_names
    # A group that has chosen its device by itself stays on it when it is connected anew.
    device_id = recipe.device_id or outer.bound_device_id
    options = recipe.options
    for part, value in (("split_from", None), ("split_color", NO_SPLIT)):
        if hasattr(options, part):  # as the last making left it
            setattr(options, part, value)
    _is_making = True
    if is_named:
        world.pg_names.pop(outer)
        c10d._unregister_process_group(name)
    try:
        with _without_splits(), native_groups(), _without_lines_of_gloo():
            group: Any = c10d._new_process_group_helper(
                outer.size(),
                outer.rank(),
                [] if is_world else list(members),
                dist.Backend(recipe.backend),
                store,
                name,
                options,
                timeout,
                None,
                device_id,
                outer.group_desc,
            )[0]
        c10d._unregister_process_group(name)
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)
        world.tags_to_pg.clear()
        world.tags_to_pg.update(tagged)
        if is_named:
            c10d._register_process_group(name, outer)
        _is_making = False
    for device, backend in recipe.backends.items():
        if backend == "gloo" and not connects_later():
            own = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", store))
            _close_listener(own, outer.rank())
    _keep_recorded(outer, group)
    return group  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_splits() -> Iterator[None]:
    """Let torch make a communicator of its own for a group, not one split from the default group's.

    torch splits where the default group has a device, and a split waits for every rank of that
    group. Ranks that are no members of the new one take no part in it in torch 2.15, where their
    backend's name is not that of the default group, as ours never is; nor do they where members
    make a group alone, or where it is connected anew. So a group is split from another in
    ``split_group()`` only, which every rank of the parent calls. For both sides nothing of it is
    then begun: neither the members' part nor, up to torch 2.14, that of all others.
    """
    default: Any = dist.group.WORLD
    bound = None if default is None else default.bound_device_id
    if bound is None:
        yield
        return
    default.bound_device_id = None  # torch asks it for nothing else while it makes a group
    try:
        yield
    finally:
        default.bound_device_id = bound


def bind_to_current_device() -> None:
    """Let groups that choose a device when they are made take this rank's current one.

    From torch 2.15 on, NCCL's class makes its communicator with the group. Where nobody has named a
    device it takes ``cuda:LOCAL_RANK``, modulo the number of devices, which is another than the
    rank's in a session whose ``devices=`` are not the first ones. The current device is the
    session's unless user code has set another.
    """
    native = getattr(c10d, "_nccl2_device", None)
    if native is None or hasattr(native, "__wrapped__"):
        return

    @functools.wraps(native)
    def choose(options: Any) -> Any:
        group = options.process_group
        if group is not None and group.bound_device_id is None and not options.enable_reconfigure:
            kind = torch.accelerator.current_accelerator()
            if kind is not None:
                index = torch.accelerator.current_device_index()
                group.bound_device_id = torch.device(kind.type, index)
        return native(options)

    setattr(c10d, "_nccl2_device", choose)  # noqa: B010 - torch before 2.15 has none


def backend_classes(group: Any) -> set[type]:
    """The classes of the backends that a native group has, but for gloo's."""
    found = set()
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            kind = type(group._get_backend(device))
            if "gloo" not in kind.__name__.lower() and not issubclass(kind, dist.ProcessGroup):
                found.add(kind)
    return found


def runs_in_order(group: Any) -> bool:
    """Whether all that a native group gives to a device runs there in the order of its issue.

    ``ProcessGroupNCCL2`` has one stream for collectives and messages. ``ProcessGroupNCCL`` and
    ``ProcessGroupNCCLLazy`` have others for pairs of ranks. Source: torch 2.15,
    ``nccl2/ProcessGroupNCCLBackend.cpp`` and ``lazy/LazyBackend.hpp``. A backend's class may say so
    by an attribute ``runs_in_order``.
    """
    kinds = backend_classes(group)
    return bool(kinds) and all(
        getattr(kind, "runs_in_order", kind.__name__ == "ProcessGroupNCCL2") for kind in kinds
    )


def native_backends() -> list[type]:
    """Those that come with torch and give operations to a device."""
    nccl = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    names = (*nccl, "ProcessGroupXCCL", "ProcessGroupUCC")
    found = [getattr(c10d, name, None) for name in names]
    return [kind for kind in found if isinstance(kind, type)]


def is_making_groups() -> bool:
    """Whether torch is making a native group for one of ours."""
    return _is_native


def graph_classes() -> list[type]:
    """The classes of graphs of devices, as far as this torch and its extensions have them."""
    accelerator = getattr(torch, "accelerator", None)
    device = None if accelerator is None else accelerator.current_accelerator()
    modules = [torch.cuda, accelerator]
    if device is not None:
        modules.append(torch.get_device_module(device))
    return [kind for module in modules for kind in _graph_classes_of(module or torch.cuda)]


def _graph_classes_of(module: Any) -> tuple[type, ...]:
    return _find_graph_classes(module, len(vars(module)))


@functools.cache
def _find_graph_classes(module: Any, _size: int) -> tuple[type, ...]:
    """Look at all that is in a module, again once that is more."""
    return tuple(
        kind
        for name, kind in vars(module).items()
        if name.endswith("Graph") and isinstance(kind, type) and _is_graph(kind)
    )


def _is_graph(kind: type) -> bool:
    return all(hasattr(kind, name) for name in ("capture_begin", "capture_end", "replay"))


def current_stream(device: torch.device) -> Any:
    """The current stream of a device; torch's own function takes longer than all the rest."""
    if device.index is None or _get_stream is None:
        return torch.accelerator.current_stream(device)
    return _get_stream(device.index)


_get_stream: Callable[[int], Any] | None = getattr(torch._C, "_accelerator_getStream", None)


def is_stream_capturing() -> bool:
    """Whether the current stream is captured, where a capture is under way at all."""
    module: Any = torch.get_device_module()
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is None or bool(asks())


def symmetric_memory_functions() -> list[tuple[Any, str]]:
    """What code calls to have symmetric memory: the class of each function, and its name."""
    kind = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    names = ("empty_strided_p2p", "rendezvous")
    return [(kind, name) for name in names if hasattr(kind, name)]


def put_in_place(owner: Any, name: str, function: Any) -> None:
    """Let a class of torch's have this function, into which the compiler does not look."""
    plain = getattr(function, "__func__", function)
    vars(plain).pop("__wrapped__", None)  # torch's own, which may have no code of Python
    _disable_dynamo(plain)
    setattr(owner, name, function)


def uses_torchcomms() -> bool:
    """Whether torch's groups are made by torchcomms."""
    is_enabled = getattr(c10d, "_use_torchcomms_enabled", None)
    return is_enabled is not None and bool(is_enabled())


def has_succeeded(work: Any) -> bool:
    """Whether an operation is over and has come to a good end.

    ``Work.is_success`` says so as well, and has torch (2.13) warn of it, once in each process: in a
    backward of the user's that looks like a warning of his code. So it is asked only where a handle
    has no future, such as that of a message.
    """
    try:
        future = work.get_future()
    except RuntimeError:
        return bool(work.is_completed() and work.is_success())
    return bool(future.done()) and has_value(future)


def has_value(future: Any) -> bool:
    """Whether a future that is done has come to a good end."""
    try:
        future.value()
    except Exception:  # what the operation came to
        return False
    return True


def is_accelerator_used() -> bool:
    """Whether there is a device other than the CPU that this process has used."""
    accelerator = getattr(torch, "accelerator", None)
    device = None if accelerator is None else accelerator.current_accelerator()
    if device is None:
        return False
    is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


class CppWarnings(RequestListener):
    """What torch's C++ code warns of: shown as under torchrun, but for what we cause ourselves.

    For each connection that is shut to free a rank torch prints a warning with a C++ stack.
    """

    ERROR = 2
    """The level, as in ``TORCH_CPP_LOG_LEVEL``, above that of warnings."""

    def __init__(self) -> None:
        self._before: int | None = None

    def mute(self) -> None:
        """From the control thread: connections are about to be shut."""
        level = _cpp_log_level()
        if level is not None and self._before is None and level.value < self.ERROR:
            self._before, level.value = level.value, self.ERROR

    def begin_request(self, request: Request) -> None:
        """The next code of the user's is no longer concerned by what was shut before it."""
        if self._before is not None and is_run(request):
            level = _cpp_log_level()
            assert level is not None
            level.value, self._before = self._before, None


@functools.cache
def _cpp_log_level() -> ctypes.c_int | None:
    """The level from which torch's C++ code logs; None where this torch keeps it elsewhere."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    try:
        library = ctypes.CDLL(os.path.join(folder, "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def abort_backends(groups: Sequence[Any]) -> None:
    """Abort the communicators of native groups that wait on a device; from any thread.

    All at once: each lets its own kernels go, then frees memory, and CUDA waits with that for what
    other communicators have on the device. NCCL's groups of calls do not help, for torch aborts in
    a thread of its own.
    """
    found: dict[int, Any] = {}
    for group in groups:
        for device in () if group is None else group._device_types:
            with contextlib.suppress(RuntimeError):
                backend = group._get_backend(device)
                found[id(backend)] = backend
    backends = [b for b in found.values() if "gloo" not in type(b).__name__.lower()]

    def abort(backend: Any) -> None:
        with contextlib.suppress(Exception):
            backend.abort()

    threads = [
        threading.Thread(target=abort, args=(backend,), name="distsession-abort", daemon=True)
        for backend in backends[1:]
    ]
    for thread in threads:
        thread.start()
    for backend in backends[:1]:
        abort(backend)
    for thread in threads:
        thread.join()


_NO_LIMIT = timedelta(days=3650)


def lift_time_limits(group: Any) -> None:
    """Let no backend but gloo look at the time limits of what it was given.

    NCCL's watchdog calls a work done as soon as it takes longer, and frees nobody: whoever asks the
    handle would not learn that its rank goes on waiting.
    """
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            # Newer torches have the first for all backends, older ones the second for NCCL.
            lift = getattr(backend, "set_timeout", None)
            lift = lift or getattr(backend, "_set_default_timeout", None)
            if lift is not None and "gloo" not in type(backend).__name__.lower():
                lift(_NO_LIMIT)


_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "pg_coalesce_state",
)
"""Of ``_world``, each by group."""

NO_SPLIT = -1
"""NCCL's ``NCCL_SPLIT_NOCOLOR``, also ``split_color``'s default."""


_GLOO_CONNECTS = 5
"""How many times its limit gloo waits for a member to connect (torch 2.8 to 2.15)."""


def make_native_group(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    detail: bool = False,
    connect_timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """A gloo group of torch's own that is in none of the world's tables.

    Args:
        store: With a prefix of its own.
        rank: Within the group.
        size: Of the group.
        timeout: Of each operation.
        detail: Compare collectives through the group itself, as ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
        connect_timeout: Of connecting it; by default as of each operation.
    """
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    cpu = dist.PrefixStore("cpu/", store)
    limit = whole = min(timeout, connect_timeout or timeout)
    if connect_timeout is not None:
        limit = whole / _GLOO_CONNECTS
    root = getattr(cpu, "_underlying_non_prefix_store", None)
    together: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(root, Store):
        together = root.addresses_together(size, whole)
    with _without_lines_of_gloo(), together:
        backend: Any = dist.ProcessGroupGloo(cpu, rank, size, timeout=limit)
        if not connects_later():
            _close_listener(cpu, rank)  # here, where its address is known
    if limit != timeout:
        backend._set_default_timeout(timeout)
    if not COUNTS_FROM_ZERO:
        backend._set_sequence_number_for_group()
    if detail:
        backend = c10d._create_process_group_wrapper(
            wrapped_pg=backend,
            store_prefix="detail",
            store=cpu,
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    nan_check = getattr(c10d, "NanCheckHook", None)  # from torch 2.14 on
    if nan_check is not None and os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        nan_check.attach(group)  # to the outer group, torch attaches one in vain
    return group


@contextlib.contextmanager
def _without_lines_of_gloo() -> Iterator[None]:
    """Leave out the line that gloo prints on each rank for a group, from torch 2.8 to 2.10.

    Ranks say different things in it, so that their own output would not be shown as equal. What
    others write meanwhile goes where it belongs, after it.
    """
    global _is_sorting
    if not _PRINTS_OF_PEERS or _is_sorting:
        yield
        return
    _is_sorting = True
    stdout, scratch = os.dup(1), os.memfd_create("distsession-gloo")
    os.dup2(scratch, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        _is_sorting = False
        with open(scratch, "r+b") as written:
            written.seek(0)
            rest = _LINE_OF_GLOO.sub(b"", written.read())
        while rest:
            rest = rest[os.write(1, rest) :]


def connects_later() -> bool:
    """Whether gloo makes its connections when they are first needed."""
    return os.environ.get(LAZY_INIT, "0") != "0"


def _close_listener(store: dist.Store, rank: int) -> None:
    """Close the port of a group that is connected: no member has to connect to it any more."""
    key = f"0/{rank}"  # of the group's only context; the value begins with the device's address
    if store.check([key]):
        abort.close_gloo_listener(store.get(key))


def set_store(group: Any, store: dist.Store) -> None:
    """Let new groups that descend from this one meet through another store."""
    backend, _ = c10d._world.pg_map[group]
    c10d._world.pg_map[group] = (backend, store)


def begin_group_count() -> None:
    """Number new groups from the beginning, as torch does once all are destroyed."""
    if not c10d._world.pg_map:
        set_group_count(0)


def set_group_count(count: int) -> None:
    """From where torch numbers new groups; their names, and so their stores, must agree."""
    c10d._world.group_count = count


def warn_of_fsdp2() -> None:
    """Say so where FSDP2 reduces gradients and does not divide them, as with gloo in torch 2.8."""
    global _ADDS_IN_FSDP2
    frame = sys._getframe() if _ADDS_IN_FSDP2 else None
    while frame is not None:
        if frame.f_code.co_filename.endswith("_fsdp_collectives.py"):
            _ADDS_IN_FSDP2 = False  # once is enough
            warnings.warn(
                f"FSDP2 adds up gradients on gloo in torch {torch.__version__}, where it should "
                "average them: torch 2.9 does.",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        frame = frame.f_back


def refresh_modules() -> None:
    """Let modules that hold a group go on after it was connected anew: DDP, and FSDP2."""
    data_parallel = torch.nn.parallel.DistributedDataParallel
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)  # where nobody has imported it, there is none
    for candidate in gc.get_objects():
        kind = type(candidate)
        try:
            if issubclass(kind, data_parallel) and "reducer" in candidate.__dict__:
                refresh_data_parallel(candidate)
            elif sharded is not None and issubclass(kind, sharded):
                _refresh_fully_sharded(candidate)
        except Exception as error:  # the others go on, and so does the group
            warnings.warn(
                f"a {kind.__name__} could not be prepared for the process group that is connected "
                f"anew ({type(error).__name__}: {error}): make it again, from a checkpoint.",
                RuntimeWarning,
                stacklevel=2,
            )


def _refresh_fully_sharded(module: Any) -> None:
    """Let an FSDP2 module begin its next pass anew.

    One that was given up leaves parameters that are gathered, though from a device nothing came,
    or only some of a group's. Of a backward pass it leaves whole gradients that were not reduced:
    those of the outermost module's own parameters, until its end. torch would add the next ones to
    them. What that pass had of these is lost; those that earlier passes have gathered without
    reducing them (``set_requires_gradient_sync(False)``) stay unless this was one of them, and so
    do those that were reduced. torch 2.15 drops all of them, and they are put back here.
    """
    state = module._get_fsdp_state()
    if not state._is_root or not hasattr(module, "reset_iter_state"):  # as of torch 2.13
        return
    was_in_backward = state._state_ctx.post_backward_final_callback_queued
    kept = []
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group._all_gather_result = None  # it would be waited for
            for parameter in group.fsdp_params:
                parameter.to_sharded()
                kept.append((parameter.sharded_param, parameter.sharded_param.grad))
                whole = getattr(parameter, "_unsharded_param", None)
                if not was_in_backward:
                    kept.append((whole, getattr(whole, "grad", None)))
                    continue
                if not _has_no_gradient_apart(parameter):
                    parameter.unsharded_accumulated_grad = None
                if whole is not None:
                    whole.grad = None
    module.reset_iter_state()
    for holder, gradient in kept:
        if gradient is not None and holder.grad is None:
            holder.grad = gradient


def _has_no_gradient_apart(parameter: Any) -> bool:
    """Whether whole gradients are those of the gathered parameter alone, as from torch 2.15 on."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def refresh_data_parallel(module: Any) -> None:
    """Give a DistributedDataParallel a new reducer, as unpickling it does.

    A collective that was given up leaves the old one in the midst of a bucket; one in a rank that
    has been replaced has its buckets in another order. Nothing is sent, no parameter changes.
    """
    if not torch_changes.is_usable(Part.REDUCER):
        return
    hooks = list(getattr(module, "_comm_hooks", ()))
    del module.logger, module.reducer  # the old one takes its autograd hooks along
    parameters, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    if module.static_graph:
        module.reducer._set_static_graph()
        module.logger._set_static_graph()
    module._comm_hooks = []
    for hook, state in hooks:
        module.register_comm_hook(state, hook)
