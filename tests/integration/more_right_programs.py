"""More right programs, which use the libraries of torch and Python in ways that look like mistakes.

See :mod:`tests.integration.right_programs`. The file is long because it is a list of programs.
"""

# ruff: noqa: E501  (a program is a text)

from __future__ import annotations

__all__ = ["MORE_RIGHT"]

LANGUAGE = {
    "a loop of asyncio's own": "async def work(): await asyncio.sleep(0.01); return 1\n"
    "assert asyncio.run(work()) == 1\n"
    "dist.barrier()",
    "a task that is made before it is awaited": "async def load(n): await asyncio.sleep(0.01 * n); return torch.ones(2)\n"
    "task = asyncio.create_task(load(rank))\n"
    "dist.barrier()\n"
    "dist.all_reduce(await task)",
    "a group of tasks, then an operation": "async def load(n): await asyncio.sleep(0.02 * n); return n\n"
    "async with asyncio.TaskGroup() as group: tasks = [group.create_task(load(n)) for n in range(rank + 1)]\n"
    "dist.all_reduce(torch.tensor(len(tasks)))",
    "a task that is cancelled and awaited": "task = asyncio.create_task(asyncio.sleep(20))\n"
    "await asyncio.sleep(0)\n"
    "task.cancel()\n"
    "try: await task\n"
    "except asyncio.CancelledError: pass\n"
    "dist.barrier()",
    "a result that is remembered by all": "@functools.lru_cache\n"
    "def total(n): t = torch.tensor(float(n)); dist.all_reduce(t); return t.item()\n"
    "assert total(1) == total(1) == 4",
    "a property that is computed once": "class Vocabulary:\n"
    "    @functools.cached_property\n"
    "    def size(self): t = torch.tensor(rank); dist.all_reduce(t, op=dist.ReduceOp.MAX); return t.item()\n"
    "vocabulary = Vocabulary()\n"
    "assert vocabulary.size == vocabulary.size == 3",
    "a finalizer that meets": "import weakref\n"
    "class Handle: pass\n"
    "handle = Handle()\n"
    "weakref.finalize(handle, dist.barrier)\n"
    "if odd: time.sleep(0.3)\n"
    "del handle",
    "a generator that all leave early": "def steps():\n"
    "    try: yield from range(5)\n"
    "    finally: dist.barrier()\n"
    "for step in (found := steps()):\n"
    "    if step == rank: break\n"
    "found.close()",
    "a context that swallows on all ranks": "class Quiet:\n"
    "    def __enter__(self): pass\n"
    "    def __exit__(self, *_): dist.barrier(); return True\n"
    "with Quiet():\n"
    "    if odd: raise ValueError('bad sample')",
    "a return in a finally, behind the operations": "def step():\n"
    "    try:\n"
    "        dist.all_reduce(torch.ones(1))\n"
    "        if odd: raise ValueError\n"
    "    finally: return None\n"
    "step(); dist.barrier()",
    "a handler of logging that reduces": "import logging\n"
    "class Handler(logging.Handler):\n"
    "    def emit(self, record): dist.reduce(torch.ones(1), 0)\n"
    "log = logging.Logger('run'); log.addHandler(Handler())\n"
    "for _ in range(3): log.info('step')",
    "a module that was written beside the notebook": "folder = tempfile.mkdtemp()\n"
    "_ = open(os.path.join(folder, 'reducing.py'), 'w').write('import torch.distributed as dist\\n\\ndef step(t):\\n    dist.all_reduce(t)\\n')\n"
    "sys.path.insert(0, folder); sys.modules.pop('reducing', None)\n"
    "import reducing; sys.path.remove(folder)\n"
    "if odd: time.sleep(0.3)\n"
    "reducing.step(torch.ones(2))",
    "a match of cases": "match rank:\n"
    "    case 0 | 1: dist.all_reduce(torch.ones(1))\n"
    "    case n if n > 1: dist.all_reduce(torch.ones(1))",
    "a wrapper around torch's function": "before = dist.all_reduce\n"
    "calls = []\n"
    "def counted(*args, **kwargs): calls.append(1); return before(*args, **kwargs)\n"
    "dist.all_reduce = counted\n"
    "try: dist.all_reduce(torch.ones(2)); model()(x).sum().backward()\n"
    "finally: dist.all_reduce = before\n"
    "assert calls",
    "functions that were imported by name": "from torch.distributed import all_reduce as reduce, barrier\n"
    "reduce(torch.ones(1)); barrier()",
    "threads that meet at a barrier of their own": "gate = threading.Barrier(2)\n"
    "def work(t=torch.ones(1)): dist.all_reduce(t, group=other); gate.wait()\n"
    "thread = threading.Thread(target=work); thread.start()\n"
    "gate.wait(); thread.join()\n"
    "dist.barrier()",
    "a lock that one thread holds over an operation": "lock = threading.Lock()\n"
    "def work(t=torch.ones(1)):\n"
    "    with lock: dist.all_reduce(t)\n"
    "threads = [threading.Thread(target=work) for _ in range(3)]\n"
    "for thread in threads: thread.start()\n"
    "for thread in threads: thread.join()",
    "a lock of a file, one rank after another": "import fcntl\n"
    "path = [tempfile.mkstemp()[1]]\n"
    "dist.broadcast_object_list(path)\n"
    "with open(path[0]) as file: fcntl.flock(file, fcntl.LOCK_EX); time.sleep(0.15)\n"
    "dist.barrier()\n"
    "if rank == 0: os.remove(path[0])",
    "an alarm that ends a sleep": "class Late(Exception): pass\n"
    "def ring(*_): raise Late\n"
    "before = signal.signal(signal.SIGALRM, ring)\n"
    "try:\n"
    "    if odd: signal.setitimer(signal.ITIMER_REAL, 0.3); time.sleep(10)\n"
    "except Late: pass\n"
    "finally: signal.signal(signal.SIGALRM, before)\n"
    "dist.barrier()",
    "an alarm while others are waited for": "rung = []\n"
    "before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)\n"
    "if odd: time.sleep(0.7)\n"
    "dist.barrier()\n"
    "signal.setitimer(signal.ITIMER_REAL, 0); signal.signal(signal.SIGALRM, before)\n"
    "assert rung",
    "a program with a limit that one rank meets": "import subprocess\n"
    "try: subprocess.run(['sleep', '10' if odd else '0'], timeout=0.3)\n"
    "except subprocess.TimeoutExpired: pass\n"
    "dist.barrier()",
    "a worker of a pool that fails, and all hear of it": "import multiprocessing\n"
    "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
    "    try: pool.apply(int, ('x' if odd else '1',)); failed = torch.zeros(1)\n"
    "    except ValueError: failed = torch.ones(1)\n"
    "dist.all_reduce(failed)\n"
    "assert failed == 1",
    "a queue that a child fills": "import multiprocessing\n"
    "context = multiprocessing.get_context('fork')\n"
    "rows = context.Queue()\n"
    "child = context.Process(target=rows.put, args=(rank,)); child.start()\n"
    "dist.all_reduce(torch.tensor(rows.get())); child.join()",
    "a pipe to a forked child": "ends = os.pipe()\n"
    "if not (child := os.fork()): os.write(ends[1], b'x'); os._exit(0)\n"
    "os.read(ends[0], 1); os.waitpid(child, 0); os.close(ends[0]); os.close(ends[1])\n"
    "dist.barrier()",
    "a server and a client in one rank": "import socket\n"
    "server = socket.create_server(('127.0.0.1', 0))\n"
    "def serve(): end, _ = server.accept(); end.sendall(b'x'); end.close()\n"
    "thread = threading.Thread(target=serve); thread.start()\n"
    "with socket.create_connection(server.getsockname()) as end: assert end.recv(1) == b'x'\n"
    "thread.join(); server.close()\n"
    "dist.barrier()",
    "a profile": "import cProfile\n"
    "with cProfile.Profile() as profile: dist.all_reduce(torch.ones(2)); dist.barrier()",
    "a trace of lines": "before = sys.gettrace()\n"
    "sys.settrace(lambda *_: None)\n"
    "try: dist.all_reduce(torch.ones(2))\n"
    "finally: sys.settrace(before)",
    "a profile of torch's": "from torch import profiler\n"
    "with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile: model()(x).sum().backward()\n"
    "assert profile.key_averages()",
    "garbage in between": "import gc\n"
    "works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(4)]\n"
    "gc.collect()\n"
    "del works; gc.collect()\n"
    "dist.barrier()",
    "a variable of a context": "import contextvars\n"
    "step = contextvars.ContextVar('step')\n"
    "def work(): step.set(3); dist.all_reduce(torch.ones(step.get()))\n"
    "contextvars.copy_context().run(work)",
    "an error group of which all catch a part": "def step():\n"
    "    dist.barrier()\n"
    "    raise ExceptionGroup('two', [OSError('a'), KeyError('b')])\n"
    "try:\n"
    "    try: step()\n"
    "    except* OSError: dist.barrier()\n"
    "except* KeyError: dist.all_reduce(torch.ones(1))",
}  # fmt: skip

LIBRARY = {
    "a tensor without data": "dist.all_reduce(torch.ones(2, device='meta'))",
    "outputs of other sizes": "sizes = [1, 2, 3, 4]\n"
    "parts = [torch.ones(n) for n in sizes]\n"
    "out = torch.empty(sizes[rank])\n"
    "dist.reduce_scatter(out, parts)\n"
    "assert out.tolist() == [4.0] * sizes[rank]",
    "a type that is refused, with one rank late": "if odd: time.sleep(0.4)\n"
    "try: dist.all_reduce(torch.ones(4, dtype=torch.int16))\n"
    "except RuntimeError: pass\n"
    "t = torch.ones(2); dist.all_reduce(t)\n"
    "assert t.tolist() == [4, 4]",
    "a type that is refused in halves": "if odd: time.sleep(0.3)\n"
    "for _ in range(3):\n"
    "    with contextlib.suppress(RuntimeError): dist.all_reduce(torch.ones(4, dtype=torch.int16), group=halves[rank // 2])\n"
    "t = torch.ones(2); dist.all_reduce(t, group=halves[rank // 2])\n"
    "assert t.tolist() == [2, 2]",
    "a type that is refused later": "try: dist.all_reduce(torch.ones(4, dtype=torch.int16), async_op=True).wait()\n"
    "except RuntimeError: pass\n"
    "if odd: time.sleep(0.3)\n"
    "dist.all_reduce(torch.ones(2))",
    "an output that is refused": "try: dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))\n"
    "except (RuntimeError, ValueError): pass\n"
    "if rank == 1: time.sleep(0.3)\n"
    "dist.barrier()",
    "a list that one rank alone gets wrong, before all": "if odd:\n"
    "    with contextlib.suppress(ValueError, RuntimeError, TypeError): dist.all_gather('x', torch.ones(1))\n"
    "dist.all_gather([torch.empty(1) for _ in range(4)], torch.ones(1))",
    "a group that some are not in": "import warnings\n"
    "with warnings.catch_warnings():\n"
    "    warnings.simplefilter('ignore')\n"
    "    dist.all_reduce(torch.ones(1), group=halves[0])\n"
    "assert (dist.get_rank(halves[0]) < 0) == (rank > 1)",
    "a root by its number in the group": "t = torch.full((1,), float(rank))\n"
    "dist.broadcast(t, group_src=1, group=halves[rank // 2])\n"
    "assert t.item() == (1 if rank < 2 else 3)",
    "objects from a root within a half": "found = [rank if rank % 2 else None]\n"
    "dist.broadcast_object_list(found, group_src=1, group=halves[rank // 2])\n"
    "assert found == [1 if rank < 2 else 3]",
    "objects to a root within a half": "found = [None] * 2 if rank % 2 == 0 else None\n"
    "dist.gather_object('x' * rank, found, dst=rank // 2 * 2, group=halves[rank // 2])",
    "subgroups that are counted out": "group, groups = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])\n"
    "dist.all_reduce(torch.ones(1), group=group)",
    "subgroups of a subgroup": "if rank < 2: group, groups = dist.new_subgroups(1, group=halves[0])\n"
    "dist.barrier()",
    "a monitored barrier with a late rank": "from datetime import timedelta\n"
    "if odd: time.sleep(0.5)\n"
    "dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)",
    "messages around a barrier": "peer = rank ^ 1\n"
    "work = dist.irecv(got := torch.empty(2), peer)\n"
    "dist.barrier()\n"
    "sent = dist.isend(torch.full((2,), float(rank)), peer)\n"
    "dist.barrier()\n"
    "work.wait(); sent.wait()\n"
    "assert got[0] == peer",
    "a work that another thread waits for": "t = torch.ones(2)\n"
    "work = dist.all_reduce(t, async_op=True)\n"
    "thread = threading.Thread(target=work.wait); thread.start(); thread.join()\n"
    "assert t.tolist() == [4, 4]",
    "a work that is waited for behind other operations": "works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]\n"
    "dist.barrier(group=halves[rank // 2])\n"
    "if odd: time.sleep(0.3)\n"
    "dist.all_reduce(torch.ones(1), group=other)\n"
    "for work in works: work.wait()",
    "halves of halves": "def reduce(t, ranks):\n"
    "    while len(ranks) > 1:\n"
    "        middle = len(ranks) // 2\n"
    "        low, high = ranks[:middle], ranks[middle:]\n"
    "        mine = low if rank in low else high\n"
    "        peer = (high if rank in low else low)[mine.index(rank)]\n"
    "        work = dist.isend(t.clone(), peer); dist.recv(got := torch.empty_like(t), peer); work.wait()\n"
    "        t, ranks = t + got, mine\n"
    "    return t\n"
    "assert reduce(torch.ones(1), [0, 1, 2, 3]).item() == 4",
    "inputs that are joined and stop early": "net = model()\n"
    "try:\n"
    "    with net.join(throw_on_early_termination=True):\n"
    "        for _ in range(2 + odd): net(x).sum().backward()\n"
    "except RuntimeError: pass\n"
    "dist.barrier()",
    "inputs that are joined without need": "net = model()\n"
    "with net.join(enable=False):\n"
    "    for _ in range(2): net(x).sum().backward()",
    "inputs that are joined, divided by who is left": "net = model()\n"
    "with net.join(divide_by_initial_world_size=False):\n"
    "    for _ in range(rank + 1): net(x).sum().backward()",
    "DDP in half precision": "net = DDP(nn.Linear(4, 4).bfloat16())\n"
    "net(x.bfloat16()).sum().backward()",
    "DDP whose backward is tried again": "net = model()\n"
    "for attempt in range(2):\n"
    "    net.zero_grad()\n"
    "    net(x).sum().backward()\n"
    "    bad = torch.tensor(float(odd and attempt == 0)); dist.all_reduce(bad)\n"
    "    if not bad: break",
    "DDP that is compiled": "net = torch.compile(model(), backend='eager')\n"
    "net(x).sum().backward()",
    "DDP beside a model of its own": "net, private = model(), nn.Linear(4, 4)\n"
    "for _ in range(rank): private(x).sum().backward()\n"
    "net(x).sum().backward()",
    "a mean of weights in the course of time": "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
    "net = model()\n"
    "mean = AveragedModel(net.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)\n"
    "for _ in range(2): net(x).sum().backward(); mean.update_parameters(net.module)",
    "sharded weights that all collect and load": "from torch.distributed.checkpoint.state_dict import *\n"
    "from torch.distributed.fsdp import fully_shard\n"
    "net = fully_shard(nn.Linear(8, 8))\n"
    "options = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
    "weights = get_model_state_dict(net, options=options)\n"
    "assert bool(weights) == (rank == 0)\n"
    "options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)\n"
    "set_model_state_dict(net, weights, options=options)",
    "sharded gradients that are clipped": "from torch.distributed.fsdp import fully_shard\n"
    "net = fully_shard(nn.Linear(8, 8))\n"
    "net(torch.ones(1, 8)).sum().backward()\n"
    "if odd: time.sleep(0.3)\n"
    "nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "sharded weights that are kept whole": "from torch.distributed.fsdp import fully_shard\n"
    "net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
    "for layer in net: fully_shard(layer, reshard_after_forward=False)\n"
    "fully_shard(net)\n"
    "for _ in range(2): net(x).sum().backward()",
    "sharded weights that are gathered ahead": "from torch.distributed.fsdp import fully_shard\n"
    "net = fully_shard(nn.Linear(4, 4))\n"
    "handle = net.unshard(async_op=True)\n"
    "if odd: time.sleep(0.3)\n"
    "handle.wait(); net.reshard()\n"
    "net(x).sum().backward()",
    "whole parameters for all to look at": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
    "net = FSDP(nn.Linear(4, 4), device_id=torch.device('cpu'))\n"
    "with FSDP.summon_full_params(net):\n"
    "    if rank == 0: print(net.weight.norm())",
    "a checkpoint of a model and its optimizer": "import torch.distributed.checkpoint as dcp\n"
    "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
    "from torch.distributed.fsdp import fully_shard\n"
    "path = [tempfile.mkdtemp()]; dist.broadcast_object_list(path)\n"
    "net = fully_shard(nn.Linear(4, 4))\n"
    "optimizer = torch.optim.Adam(net.parameters())\n"
    "net(x).sum().backward(); optimizer.step()\n"
    "weights, moments = get_state_dict(net, optimizer)\n"
    "if odd: time.sleep(0.3)\n"
    "dcp.save({'net': weights, 'optimizer': moments}, checkpoint_id=path[0])\n"
    "dcp.load({'net': weights, 'optimizer': moments}, checkpoint_id=path[0])",
    "a checkpoint that is not there, and a fresh start": "import torch.distributed.checkpoint as dcp\n"
    "from torch.distributed.checkpoint.api import CheckpointException\n"
    "try: dcp.load({'w': some}, checkpoint_id='/no/such/checkpoint')\n"
    "except CheckpointException: dist.barrier()",
    "a checkpoint without the others": "import torch.distributed.checkpoint as dcp\n"
    "if rank == 0: dcp.save({'w': some}, checkpoint_id=tempfile.mkdtemp(), no_dist=True)",
    "a mesh by its groups": "from torch.distributed.device_mesh import DeviceMesh\n"
    "mesh = DeviceMesh.from_group(halves[rank // 2], 'cpu')\n"
    "dist.all_reduce(torch.ones(1), group=mesh.get_group())",
    "a DTensor that is made in parts": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "t = dt.ones(8, device_mesh=mesh, placements=[dt.Shard(0)])\n"
    "if odd: time.sleep(0.3)\n"
    "assert t.full_tensor().shape == (8,)",
    "a DTensor whose parts each rank looks at": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "t = dt.distribute_tensor(torch.arange(8.0), mesh, [dt.Shard(0)])\n"
    "for _ in range(rank): t.to_local().sum().item()\n"
    "t.redistribute(mesh, [dt.Replicate()])",
    "a pipeline of one micro-batch for each stage": "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\n"
    "stage = PipelineStage(nn.Linear(4, 4), rank, 4, torch.device('cpu'))\n"
    "schedule = ScheduleGPipe(stage, 4)\n"
    "for _ in range(2): schedule.step(*[torch.ones(8, 4)] * (rank == 0))",
    "a pipeline with two stages on each rank": "from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B\n"
    "stages = [PipelineStage(nn.Linear(4, 4), n, 8, torch.device('cpu')) for n in (rank, rank + 4)]\n"
    "schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)\n"
    "schedule.step(*[torch.ones(8, 4)] * (rank == 0), **({'target': torch.ones(8, 4)} if rank == 3 else {}))",
    "workers that fail on one rank, and all hear of it": "class Files(data.Dataset):\n"
    "    def __len__(self): return 2\n"
    "    def __getitem__(self, n):\n"
    "        if odd: raise OSError('gone')\n"
    "        return n\n"
    "failed = torch.zeros(1)\n"
    "try: batches = list(data.DataLoader(Files(), num_workers=1))\n"
    "except OSError: failed += 1\n"
    "dist.all_reduce(failed)\n"
    "assert failed == 1",
    "lines that are dealt out in turn, and counted": "lines = list(range(10)[rank::4])\n"
    "steps = torch.tensor(len(lines)); dist.all_reduce(steps, op=dist.ReduceOp.MIN)\n"
    "for line, _ in zip(lines, range(steps)): dist.all_reduce(torch.ones(1))",
    "a metric whose list is empty on one rank": "states = [] if odd else [torch.ones(2)]\n"
    "state = torch.cat(states) if states else torch.empty(0)\n"
    "sizes = [torch.empty(1, dtype=torch.int64) for _ in range(4)]\n"
    "dist.all_gather(sizes, torch.tensor([len(state)]))\n"
    "most = int(max(sizes))\n"
    "found = [torch.empty(most) for _ in range(4)]\n"
    "dist.all_gather(found, nn.functional.pad(state, (0, most - len(state))))\n"
    "assert sum(int(n) for n in sizes) == 6",
    "keys that are set and read at once": "store = dist.PrefixStore('many', dist.distributed_c10d._get_default_store())\n"
    "store.set(f'at{rank}', str(rank))\n"
    "store.wait([f'at{n}' for n in range(4)])\n"
    "assert store.multi_get([f'at{n}' for n in range(4)]) == [b'0', b'1', b'2', b'3']",
    "a key that is compared and set": "store = dist.PrefixStore('leader', dist.distributed_c10d._get_default_store())\n"
    "leader = store.compare_set('who', '', str(rank))\n"
    "found = [None] * 4\n"
    "dist.all_gather_object(found, leader)\n"
    "assert len(set(found)) == 1",
    "another precision by default": "before = torch.get_default_dtype()\n"
    "torch.set_default_dtype(torch.float64)\n"
    "try: model()(x.double()).sum().backward()\n"
    "finally: torch.set_default_dtype(before)",
    "autocast on all ranks": "with torch.autocast('cpu', torch.bfloat16): loss = model()(x).sum()\n"
    "loss.backward()",
    "without gradients, in inference": "with torch.inference_mode(): t = torch.ones(2); dist.all_reduce(t)\n"
    "with torch.no_grad(): functional.all_reduce(torch.ones(2), 'sum', other).sum().item()",
    "steps that rank 0 counts": "end = time.monotonic() + 0.3\n"
    "while True:\n"
    "    go = torch.tensor(float(time.monotonic() < end)) if rank == 0 else torch.zeros(())\n"
    "    dist.broadcast(go, 0)\n"
    "    if not go: break\n"
    "    dist.all_reduce(torch.ones(1))",
    "a step that is compiled, with one rank late": "@torch.compile(backend='eager')\n"
    "def step(t): return functional.all_reduce(t * 2, 'sum', other) + 1\n"
    "if odd: time.sleep(0.4)\n"
    "assert step(torch.ones(3)).sum() == 27",
}  # fmt: skip

MORE_RIGHT: dict[str, str] = LANGUAGE | LIBRARY
