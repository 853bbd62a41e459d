"""The suites: which classes of tests, with how many ranks, and what is around each method.

torch's tests of ranks ship in its wheel, as classes that a file of its repository puts together.
Here they are put together in the same way. ``cases`` is written after tests that its wheel lacks.
Each method runs in a process that is a rank already.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["SUITES", "Suite", "methods"]

RPC = "torch.testing._internal.distributed.rpc"
GROUP_TIMEOUT = timedelta(seconds=60)

Around = Callable[[Any, int, Path], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Suite:
    """Tests that run with the same number of ranks.

    Attributes:
        name: Of the suite, as told to ``--suite``.
        ranks: How many ranks it takes.
        make: Builds the class. It imports torch.
        around: What is done around each method, given the case, the world size and the folder.
        parts: Its tests are those whose names contain one of these.
        is_ours: Whether its tests are those of ``cases``.
        is_once: Each method gets new ranks. torch keeps the first RPC agent of a process for ever,
            and remote references fail where RPC is begun again, on ranks and in any process.
    """

    name: str
    ranks: int
    make: Callable[[], type]
    around: Around
    parts: tuple[str, ...] = ("",)
    is_ours: bool = False
    is_once: bool = False


@contextlib.contextmanager
def in_a_group(case: Any, world_size: int, folder: Path) -> Iterator[None]:
    """A process group for the method alone, as every process makes it in torch's runner."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{case.file_name}",
        world_size=world_size,
        rank=case.rank,
        timeout=_timeout(case),
    )
    try:
        yield
    finally:
        _destroy()


@contextlib.contextmanager
def between_barriers(case: Any, world_size: int, folder: Path) -> Iterator[None]:
    """The same, with the barriers of torch's ``TestDistBackend``, which are files."""
    from torch.testing._internal.distributed import distributed_test

    (folder / "barrier").mkdir(exist_ok=True)
    (folder / "test_dir").mkdir(exist_ok=True)
    distributed_test.Barrier.barrier_id = 0
    with in_a_group(case, world_size, folder):
        case._barrier(timeout=30)
        yield
        case._barrier(timeout=30)


@contextlib.contextmanager
def alone(case: Any, world_size: int, folder: Path) -> Iterator[None]:
    """Nothing: the method makes what it needs."""
    try:
        yield
    finally:
        _destroy()


def _destroy() -> None:
    import torch.distributed as dist

    with contextlib.suppress(AssertionError, ValueError):  # some tests do it themselves
        dist.destroy_process_group()


def _timeout(case: Any) -> timedelta:
    from torch.testing._internal.distributed import distributed_test

    seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(case._testMethodName)
    return GROUP_TIMEOUT if seconds is None else timedelta(seconds=seconds)


def _distributed() -> type:
    from torch.testing._internal.distributed import distributed_test as module

    bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)
    return type("Distributed", bases, {})


def _case(module: str, name: str) -> Callable[[], type]:
    return lambda: getattr(importlib.import_module(f"tests.torch_suites.cases.{module}"), name)


def _with_agent(module: str, name: str, fixture: str) -> Callable[[], type]:
    def make() -> type:
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        tests = getattr(importlib.import_module(module), name)
        mixin = getattr(importlib.import_module(f"{RPC}.{fixture}_fixture"), _FIXTURES[fixture])
        made = type(name, (tests, mixin, MultiProcessTestCase), {"__module__": __name__})
        globals()[name] = made  # pickle looks for it here, for some tests call it on other ranks
        return made

    return make


_FIXTURES = {
    "tensorpipe_rpc_agent_test": "TensorPipeRpcAgentTestFixture",
    "faulty_rpc_agent_test": "FaultyRpcAgentTestFixture",
}


def _rpc(name: str, module: str, tests: str, ranks: int = 4, agent: str = "tensorpipe") -> Suite:
    full = f"{RPC}.{module}" if "." not in module else module
    return Suite(
        name, ranks, _with_agent(full, tests, f"{agent}_rpc_agent_test"), alone, is_once=True
    )


_ROOT = "torch.testing._internal.distributed"
FOR_FOUR = ("_group", "_failure_order", "_wait_all_ranks")
"""In the names of tests that take more than three ranks."""
SUITES = (
    Suite("distributed", 3, _distributed, between_barriers),
    Suite("common", 3, _case("common", "Common"), in_a_group, is_ours=True),
    Suite("backend", 3, _case("backend", "Backend"), alone, is_ours=True),
    Suite("store", 3, _case("store", "Store"), alone, is_ours=True),
    Suite("distributed_4", 4, _distributed, between_barriers, parts=FOR_FOUR),
    _rpc("rpc", "rpc_test", "RpcTest"),
    _rpc("rpc_tensorpipe", "rpc_test", "TensorPipeAgentRpcTest"),
    _rpc("dist_autograd", "dist_autograd_test", "DistAutogradTest"),
    _rpc("dist_autograd_tensorpipe", "dist_autograd_test", "TensorPipeAgentDistAutogradTest"),
    _rpc("dist_optimizer", "dist_optimizer_test", "DistOptimizerTest"),
    _rpc("parameter_server", f"{RPC}.examples.parameter_server_test", "ParameterServerTest"),
    _rpc(
        "reinforcement_learning",
        f"{RPC}.examples.reinforcement_learning_rpc_test",
        "ReinforcementLearningRpcTest",
    ),
    _rpc("jit_rpc", f"{RPC}.jit.rpc_test", "JitRpcTest"),
    _rpc("jit_dist_autograd", f"{RPC}.jit.dist_autograd_test", "JitDistAutogradTest"),
    _rpc("remote_module", f"{_ROOT}.nn.api.remote_module_test", "RemoteModuleTest", ranks=2),
    _rpc(
        "remote_module_3",
        f"{_ROOT}.nn.api.remote_module_test",
        "ThreeWorkersRemoteModuleTest",
        ranks=3,
    ),
    _rpc(
        "ddp_under_dist_autograd",
        f"{_ROOT}.ddp_under_dist_autograd_test",
        "DdpUnderDistAutogradTest",
        ranks=6,
    ),
    _rpc("ddp_comparison", f"{_ROOT}.ddp_under_dist_autograd_test", "DdpComparisonTest"),
    _rpc("faulty_rpc", "faulty_agent_rpc_test", "FaultyAgentRpcTest", agent="faulty"),
    _rpc(
        "faulty_dist_autograd", "dist_autograd_test", "FaultyAgentDistAutogradTest", agent="faulty"
    ),
    _rpc("jit_faulty_rpc", f"{RPC}.jit.rpc_test_faulty", "JitFaultyAgentRpcTest", agent="faulty"),
)


def prepare(suite: Suite) -> None:
    """Set what torch's tests read from the environment while they are imported."""
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(suite.ranks)
    os.environ.setdefault("TEMP_DIR", "/tmp")


def methods(suite: Suite) -> list[str]:
    """Names of its tests, in their order."""
    prepare(suite)
    tests = suite.make()
    names = (name for name in dir(tests) if name.startswith("test"))
    return sorted(name for name in names if any(part in name for part in suite.parts))
