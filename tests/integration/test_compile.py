"""``torch.compile`` on ranks: dynamo meets our Python code where C++ calls it."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator

import pytest

from distsession import CollectiveMismatchError, RunError, Session
from tests.backends import GLOO, STANDIN, Backend

from .conftest import Recorder

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="inductor needs a C++ compiler for the CPU",
)
COMPILERS = [
    pytest.param(GLOO, "eager", id="gloo, eager"),
    pytest.param(GLOO, "inductor", id="gloo, inductor", marks=needs_compiler),
    pytest.param(STANDIN, "aot_eager", id="standin, aot_eager"),  # inductor knows no such device
]

PROGRAMS = """
import torch.nn as nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

def plain(module):
    return module

def replicated(compiled):
    return compiled(DistributedDataParallel(net()))

def static(compiled):
    return compiled(DistributedDataParallel(net(), static_graph=True))

def compiled_before(compiled):
    return DistributedDataParallel(compiled(net()))

def sharded(compiled):
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for parameter in module.parameters():
        nn.init.constant_(parameter, .03)
    for part in module:
        if isinstance(part, nn.Linear):
            fully_shard(part)
    return compiled(fully_shard(module))

def train(make, compiled):
    module = make(compiled)
    optimizer = torch.optim.SGD(module.parameters(), lr=.1)
    generator = torch.Generator(device).manual_seed(rank)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = module(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def messages(x):
    y = x * 2
    dist.barrier()
    dist.broadcast(y, 1)
    (dist.send if rank == 0 else dist.recv)(y, 1 - rank)
    return (y + 1,)

def collectives(x):
    y = x * 2
    dist.all_reduce(y)
    parts = [torch.empty_like(y) for _ in range(world_size)]
    dist.all_gather(parts, y + rank)
    whole = torch.zeros(2 * len(y))
    dist.all_gather_into_tensor(whole, y)
    part = torch.zeros(len(y))
    dist.reduce_scatter_tensor(part, whole)
    dist.all_reduce(y, async_op=True).wait()
    return y, part, *parts

def functional(x):
    y = all_reduce(x * 2, "sum", dist.group.WORLD)
    return y + 1, all_gather_tensor(y + rank, 0, dist.group.WORLD)

def grouped(x):
    y = x * 2
    dist.all_reduce(y, group=dist.new_group([0, 1]))
    return (y,)

def printing(x):
    y = x * 2
    print("within", y.sum().item())
    return (y,)

def results(program, compiled):
    return [[t.tolist() for t in compiled(program)(torch.ones(3) + rank)] for _ in range(2)]

def compiler(backend):
    torch._dynamo.reset()
    return lambda thing: torch.compile(thing, backend=backend)
"""
MODELS = (
    "replicated",
    "static",
    "compiled_before",
    "sharded",
)
FUNCTIONS = ("messages", "collectives", "functional", "grouped", "printing")


@pytest.fixture(scope="module")
def sessions() -> Iterator[dict[Backend, tuple[Session, Recorder]]]:
    """Those that have been started, by their backend."""
    started: dict[Backend, tuple[Session, Recorder]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [session.close() for session, _ in started.values()])
        yield started


@pytest.fixture
def backend() -> Backend:
    return GLOO


@pytest.fixture
def ready(backend: Backend, sessions: dict[Backend, tuple[Session, Recorder]]) -> Session:
    if backend not in sessions:
        output = Recorder()
        sessions[backend] = backend.session(2, output=output), output
        sessions[backend][0].execute(PROGRAMS, label="In[1]")
    return sessions[backend][0]


@pytest.fixture
def output(
    ready: Session, backend: Backend, sessions: dict[Backend, tuple[Session, Recorder]]
) -> Recorder:
    sessions[backend][1].clear()
    return sessions[backend][1]


@pytest.mark.parametrize(("backend", "compiler"), COMPILERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_compiled_model_trains_as_one_that_is_not(
    ready: Session, model: str, compiler: str
) -> None:
    plain = ready.evaluate(f"train({model}, plain)")
    compiled = ready.evaluate(f"train({model}, compiler({compiler!r}))")
    for rank in ready.ranks:
        assert compiled[rank] == pytest.approx(plain[rank], rel=1e-4)


@pytest.mark.parametrize(("backend", "compiler"), COMPILERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_compiled_function_communicates(ready: Session, function: str, compiler: str) -> None:
    plain = dict(ready.evaluate(f"results({function}, plain)"))
    before = begun(ready)
    assert dict(ready.evaluate(f"results({function}, compiler({compiler!r}))")) == plain
    if function in ("collectives", "functional"):
        assert begun(ready) > before  # it was seen


def begun(session: Session) -> int:
    """How many operations of all ranks rank 0 has begun."""
    return session.recovery.reports(ask=False)[0].sequences.get("world", 0)


@pytest.mark.parametrize(("backend", "compiler"), COMPILERS)
@pytest.mark.parametrize("function", ["functional", "collectives"])
def test_a_mismatch_in_compiled_code_names_the_function(
    ready: Session, backend: Backend, function: str, compiler: str
) -> None:
    line = 1 + PROGRAMS[: PROGRAMS.index(f"def {function}(")].count("\n")
    with pytest.raises(RunError) as caught:
        ready.execute(
            f"print([t.tolist() for t in compiler({compiler!r})({function})(torch.ones(3 + rank))])"
        )
    assert isinstance(caught.value.first, CollectiveMismatchError)
    assert re.search(r"rank 0 called all_reduce with float32 \[3\]", str(caught.value))
    assert re.search(rf"at In\[1\] line {line}\b", str(caught.value))
    assert ready.evaluate(f"results({function}, plain)")


def test_what_dynamo_logs_while_it_meets_a_print_is_written(
    ready: Session, output: Recorder
) -> None:
    ready.execute("torch._logging.set_logs(dynamo=10)")
    try:
        ready.execute("results(printing, compiler('eager'))")
    finally:
        ready.execute("torch._logging.set_logs()")
    assert output.text(0).count("within 6.0") == 2
    # dynamo says of each frame whether it takes it.
    seen = re.findall(r"(?:skipping|compiling|Compiling).*", output.text(0, "stderr"))
    assert not [line for line in seen if "distsession/engine" in line]


def test_ranks_that_wait_in_compiled_code_are_freed(ready: Session) -> None:
    ready.execute("kept = 5")
    with pytest.raises(RunError, match="division by zero"):
        ready.execute("if rank == 0: 1 / 0\ncompiler('eager')(messages)(torch.ones(3))")
    assert dict(ready.evaluate("kept")) == {0: 5, 1: 5}
    assert ready.evaluate("results(messages, compiler('eager'))")


def test_dynamo_is_not_imported_for_it(start: Callable[..., Session], cold_agents: None) -> None:
    assert not any(start(2).evaluate("'torch._dynamo' in __import__('sys').modules").values())
