"""Right programs, of which many look like a broken one: none may give an error or a remark.

Each is a cell that four ranks run after ``SETUP`` of :mod:`tests.integration.first_lines`.
They also run without a session, under torchrun with gloo::

    torchrun --nproc-per-node 4 -m tests.integration.first_lines --plain

The file is long because it is a list of programs.
"""

# ruff: noqa: E501  (a program is a text)

from __future__ import annotations

from tests.integration.more_right_programs import MORE_RIGHT

__all__ = ["RIGHT"]

FIRST = {
    "a barrier after an error that all handle": "try: {}['x']\nexcept KeyError: dist.barrier()",
    "an error of one rank that is handled": "try:\n    if odd: raise ValueError\n"
    "except ValueError: pass\ndist.all_reduce(some)",
    "an error of one rank, told to all in its handler": "failed = torch.zeros(1)\n"
    "try:\n    if odd: raise ValueError\n    dist.all_reduce(failed)\n"
    "except ValueError: dist.all_reduce(failed)",
    "a finally with a barrier": "try: dist.all_reduce(some)\nfinally: dist.barrier()",
    "an exit stack": "with contextlib.ExitStack() as stack: stack.callback(dist.barrier)",
    "a slow rank": "if odd: time.sleep(0.8)\ndist.barrier()",
    "a slow rank in another place": "if odd: time.sleep(0.4); dist.barrier()\n"
    "else: dist.barrier()",
    "halves": "dist.all_reduce(some, group=halves[rank // 2])",
    "one half only": "if rank > 1: dist.all_reduce(some, group=halves[1])",
    "local synchronization": "if rank < 2: dist.new_group([0, 1], use_local_synchronization=True)",
    "a ring": "t = torch.ones(2)\n"
    "work = dist.isend(t, (rank + 1) % 4)\ndist.recv(torch.ones(2), (rank - 1) % 4)\nwork.wait()",
    "even and odd ranks": "t, peer = torch.ones(2), rank ^ 1\n"
    "dist.send(t, peer) if rank % 2 else dist.recv(t, peer)",
    "a batch of messages": "ops = [dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % 4),\n"
    "       dist.P2POp(dist.irecv, torch.ones(3), (rank - 1) % 4)]\n"
    "for work in dist.batch_isend_irecv(ops): work.wait()",
    "from anybody": "if odd:\n    for _ in range(3): dist.recv(torch.ones(1))\n"
    "else: dist.send(torch.ones(1), 2)",
    "tags in another order": "if rank == 0:\n    for tag in (1, 2): dist.send(torch.ones(1), 1, tag=tag)\n"
    "if rank == 1:\n    for tag in (1, 2): dist.recv(torch.ones(1), 0, tag=tag)",
    "works that are waited for in another order": "works = [dist.all_reduce(torch.ones(2), async_op=True)"
    " for _ in range(5)]\nfor work in reversed(works) if odd else works: work.wait()",
    "a work that nobody waits for": "dist.all_reduce(torch.ones(2), async_op=True)\ndist.barrier()",
    "splits of each rank": "send = [rank + 1] * 4\nget = [1, 2, 3, 4]\n"
    "dist.all_to_all_single(torch.ones(10), torch.ones(4 * rank + 4), get, send)",
    "objects of other sizes": "found = [None] * 4\ndist.all_gather_object(found, 'x' * 10 ** rank)",
    "objects to one": "dist.gather_object(rank, [None] * 4 if rank == 0 else None)",
    "a broadcast of objects": "dist.broadcast_object_list([rank, 'x' * 1000 * rank], 3)",
    "a reduction to one": "dist.reduce(torch.ones(3), 1)",
    "DDP": "net = model()\nfor _ in range(3): net(x).sum().backward()",
    "DDP without a step of its own": "net = model()\nwith net.no_sync(): net(x).sum().backward()\n"
    "net(x).sum().backward()",
    "DDP with parameters that one rank does not use": "net = DDP(nn.ModuleList([nn.Linear(4, 4)] * 1"
    " + [nn.Linear(4, 4)]), find_unused_parameters=True)\n"
    "net.module.forward = lambda t: net.module[0](t) + (0 if odd else net.module[1](t))\n"
    "net(x).sum().backward()",
    "uneven inputs that are joined": "net = model()\n"
    "with net.join():\n    for _ in range(2 + odd): net(x).sum().backward()",
    "sharded": "from torch.distributed.fsdp import fully_shard\nnet = nn.Linear(4, 4)\n"
    "fully_shard(net)\nnet(x).sum().backward()",
    "a DTensor": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "dt.distribute_tensor(torch.ones(8), mesh, [dt.Shard(0)]).full_tensor()",
    "a mesh of two dimensions": "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))\n"
    "dist.all_reduce(torch.ones(1), group=mesh.get_group('b'))",
    "functional": "functional.all_reduce(some, 'sum', other).sum().item()",
    "the rest of a round by one rank": "if odd: print(sum(range(10 ** 6)))\ndist.barrier()",
    "a thread": "def reduce(t=torch.ones(3)): dist.all_reduce(t)\n"
    "thread = threading.Thread(target=reduce)\nthread.start()\nthread.join()",
    "two threads on two groups": "def work(group): dist.all_reduce(torch.ones(2), group=group)\n"
    "with ThreadPoolExecutor(2) as pool: list(pool.map(work, [other, halves[rank // 2]]))",
    "a key that one sets later": "store = dist.distributed_c10d._get_default_store()\n"
    "if odd: time.sleep(0.4); store.set('k', 'v')\nelse: store.get('k')\ndist.barrier()",
    "a group that is destroyed": "group = dist.new_group([0, 1, 2, 3])\n"
    "dist.barrier(group=group)\ndist.destroy_process_group(group)",
    "a child process": "import multiprocessing\n"
    "child = multiprocessing.get_context('fork').Process(target=print, args=('x',))\n"
    "child.start()\nchild.join()\ndist.barrier()",
    "workers of a DataLoader": "for batch in data.DataLoader(range(4), num_workers=1):\n"
    "    dist.all_reduce(torch.ones(1))",
    "a loop that ends by a vote": "for step in range(9):\n"
    "    stop = torch.tensor(float(odd and step == 3))\n    dist.all_reduce(stop)\n"
    "    if stop: break",
    "retries within a handler": "try: raise OSError\nexcept OSError:\n"
    "    for _ in range(3): dist.all_reduce(some)",
    "a generator with a collective": "def steps():\n    for _ in range(2):\n        dist.barrier()\n"
    "        yield\nfor _ in steps(): dist.all_reduce(some)",
    "an iterator that ends": "batches = iter(range(2))\n"
    "while True:\n    try: next(batches)\n    except StopIteration: dist.barrier(); break\n"
    "    dist.all_reduce(some)",
    "an assertion that holds": "assert torch.isfinite(some).all()\ndist.monitored_barrier()",
    "an empty tensor": "dist.all_reduce(torch.ones(0))",
    "a refusal that all catch": "try: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)\n"
    "except RuntimeError: pass",
    "an error in a thread that nobody needs": "def fail():\n    try: raise ValueError\n"
    "    except ValueError: pass\nthread = threading.Thread(target=fail)\nthread.start()\n"
    "thread.join()\ndist.barrier()",
}  # fmt: skip

CONTROL = {
    # Who does what differs from rank to rank, but all come to the same operations.
    "only rank 0 saves, and all load": "path = os.path.join(tempfile.gettempdir(), f\"weights-{os.environ['MASTER_PORT']}.pt\")\n"
    "if rank == 0: torch.save({'w': torch.arange(4)}, path)\n"
    "dist.barrier()\n"
    "found = torch.load(path)['w'].tolist()\n"
    "dist.barrier()\n"
    "if rank == 0: os.remove(path)\n"
    "assert found == [0, 1, 2, 3]",
    "the first downloads, then the others": "if rank > 0: dist.barrier()\n"
    "time.sleep(0.4 if rank == 0 else 0)\n"
    "if rank == 0: dist.barrier()",
    "one rank after another": "for turn in range(4):\n"
    "    if turn == rank: time.sleep(0.15)\n"
    "    dist.barrier()",
    "one call at other lines": "t = torch.tensor([rank + 1.0])\n"
    "if rank == 0:\n"
    "    dist.all_reduce(t)\n"
    "elif rank == 1:\n"
    "    log = 'waits'\n"
    "    dist.all_reduce(t)\n"
    "else:\n"
    "    dist.all_reduce(t)\n"
    "assert t.item() == 10",
    "helpers by other ways": "def total(t): dist.all_reduce(t); return t\n"
    "def by_a(t): return total(t)\n"
    "def by_b(t): return by_a(t + 0)\n"
    "assert (by_b if odd else by_a)(torch.ones(2)).sum() == 8",
    "other positional and keyword arguments": "t = torch.ones(2)\n"
    "dist.all_reduce(t, dist.ReduceOp.MAX, other) if odd else dist.all_reduce(op=dist.ReduceOp.MAX, group=other, tensor=t)",
    "an early return after the last operation": "def step():\n"
    "    dist.all_reduce(torch.ones(2))\n"
    "    if rank: return\n"
    "    time.sleep(0.6)\n"
    "    return sum(range(1000))\n"
    "step()",
    "a loop that some leave before its last log": "for n in range(5):\n"
    "    dist.all_reduce(torch.ones(1))\n"
    "    if n == 4 and odd: break\n"
    "    log = [n] * 1000",
    "a recursive reduction": "def reduce(t, depth): return t if depth == 0 else reduce(functional.all_reduce(t, 'avg', other), depth - 1)\n"
    "assert reduce(torch.ones(2), 5).tolist() == [1, 1]",
    "other batches, one number of steps": "batches = [torch.ones(n + 1, 4) for n in range(5 + rank)]\n"
    "count = torch.tensor(len(batches))\n"
    "dist.all_reduce(count, op=dist.ReduceOp.MIN)\n"
    "net = model()\n"
    "for batch in batches[:count]: net(batch).sum().backward()\n"
    "assert count == 5",
    "padding to the longest": "t = torch.arange(rank + 1.0)\n"
    "size = torch.tensor(len(t))\n"
    "dist.all_reduce(size, op=dist.ReduceOp.MAX)\n"
    "padded = nn.functional.pad(t, (0, size - len(t)))\n"
    "found = [torch.empty(size) for _ in range(4)]\n"
    "dist.all_gather(found, padded)\n"
    "assert torch.stack(found).sum() == 10",
    "a decision of rank 0": "action = [random.choice(['reduce', 'gather', 'wait'])] if rank == 0 else [None]\n"
    "dist.broadcast_object_list(action)\n"
    "if action == ['reduce']: dist.all_reduce(torch.ones(2))\n"
    "elif action == ['gather']: dist.all_gather([torch.ones(1)] * 4, torch.ones(1))\n"
    "else: dist.barrier()",
    "early stopping that all hear of": "best, waited = 9.0, 0\n"
    "for loss in (3.0, 2.0, 2.5, 2.6, 1.0):\n"
    "    mean = torch.tensor(loss + rank * 0.01)\n"
    "    dist.all_reduce(mean)\n"
    "    waited = 0 if mean / 4 < best else waited + 1\n"
    "    best = min(best, mean.item() / 4)\n"
    "    if waited == 2: break",
    "random numbers of each rank": "torch.manual_seed(rank)\n"
    "t = torch.rand(3)\n"
    "found = [torch.empty(3) for _ in range(4)]\n"
    "dist.all_gather(found, t)\n"
    "assert not torch.equal(found[0], found[1])",
    "a metric of rank 0's log": "loss = torch.tensor(float(rank))\n"
    "dist.reduce(loss, 0)\n"
    "if rank == 0: logged = f'{loss.item() / 4:.2f}'",
    "a frame that is shown while others wait": "import traceback\n"
    "if odd: shown = [''.join(traceback.format_stack()) for _ in range(50)]\n"
    "dist.barrier()",
    "garbage that takes its time": "import gc\n"
    "class Slow:\n"
    "    def __del__(self): time.sleep(0.1)\n"
    "kept_objects = [Slow() for _ in range(5)] if odd else []\n"
    "kept_objects.clear(); gc.collect()\n"
    "dist.barrier()",
    "steps of gradients that are scaled": "scale = 4.0\n"
    "for step in range(3):\n"
    "    overflow = torch.tensor(float(step == 1 and odd))\n"
    "    dist.all_reduce(overflow, op=dist.ReduceOp.MAX)\n"
    "    if overflow: scale /= 2; continue\n"
    "    dist.all_reduce(torch.ones(4) * scale)\n"
    "assert scale == 2",
    "code that counts on what it is": "t = torch.ones(1)\n"
    "{0: dist.all_reduce, 1: lambda t: dist.all_reduce(t), 2: functools.partial(dist.all_reduce, op=dist.ReduceOp.SUM), 3: getattr(dist, 'all_reduce')}[rank](t)\n"
    "assert t.item() == 4",
}  # fmt: skip

ERRORS = {
    # Exceptions that belong to the program.
    "an error of each rank": "for _ in range(3):\n"
    "    try: raise OSError(rank)\n"
    "    except OSError: pass\n"
    "    dist.barrier()",
    "an error that all raise after an operation": "def step():\n"
    "    dist.all_reduce(torch.ones(2))\n"
    "    raise LookupError('the end')\n"
    "try: step()\n"
    "except LookupError: dist.barrier()",
    "a file that one rank lacks": "try: found = open('/tmp/no-such-file' if odd else os.devnull).read()\n"
    "except FileNotFoundError: found = None\n"
    "missing = torch.tensor(int(found is None))\n"
    "dist.all_reduce(missing)\n"
    "assert missing == 1",
    "a failure that a flag tells, and all try again": "for attempt in range(3):\n"
    "    failed = torch.zeros(1)\n"
    "    try:\n"
    "        if odd and attempt == 0: raise ConnectionError('reset')\n"
    "    except ConnectionError: failed += 1\n"
    "    dist.all_reduce(failed)\n"
    "    if not failed: break\n"
    "assert attempt == 1",
    "a failure that a flag tells, and all raise": "flag = torch.tensor(float(odd))\n"
    "dist.all_reduce(flag)\n"
    "try:\n"
    "    if flag: raise RuntimeError('some rank failed')\n"
    "except RuntimeError: pass\n"
    "dist.barrier()",
    "errors that are gathered as objects": "try: outcome = 1 // (not odd)\n"
    "except ZeroDivisionError as error: outcome = error\n"
    "outcomes = [None] * 4\n"
    "dist.all_gather_object(outcomes, outcome)\n"
    "assert sum(isinstance(o, ZeroDivisionError) for o in outcomes) == 1",
    "suppressed errors": "with contextlib.suppress(KeyError, ValueError):\n"
    "    if odd: raise KeyError('x')\n"
    "    if rank == 1: raise ValueError\n"
    "dist.all_reduce(torch.ones(2))",
    "a stop of an iterator in some ranks first": "batches = iter(range(2 + rank))\n"
    "while True:\n"
    "    done = torch.tensor(int(next(batches, None) is None))\n"
    "    dist.all_reduce(done, op=dist.ReduceOp.MIN)\n"
    "    if done: break",
    "a finally after an error that all raise": "try:\n"
    "    try: raise KeyError('all')\n"
    "    finally: dist.all_reduce(torch.ones(2))\n"
    "except KeyError: dist.barrier()",
    "a batch too large for one": "sizes = []\n"
    "for size in (8, 4, 2):\n"
    "    try:\n"
    "        if odd and size > 2: raise MemoryError\n"
    "        fits = torch.ones(1)\n"
    "    except MemoryError: fits = torch.zeros(1)\n"
    "    dist.all_reduce(fits, op=dist.ReduceOp.MIN)\n"
    "    if fits: break\n"
    "assert size == 2",
    "an argument that all get wrong": "for wrong in (lambda: dist.all_reduce('x'), lambda: dist.broadcast(torch.ones(1), src=9)):\n"
    "    with contextlib.suppress(Exception): wrong()\n"
    "dist.barrier()",
    "an error within a context that ends with a barrier": "@contextlib.contextmanager\n"
    "def together():\n"
    "    try: yield\n"
    "    except ValueError: pass\n"
    "    finally: dist.barrier()\n"
    "with together():\n"
    "    if odd: raise ValueError('only here')",
    "an exception group": "try: raise ExceptionGroup('several', [ValueError(1), KeyError(2)])\n"
    "except* ValueError: dist.barrier()\n"
    "except* KeyError: dist.all_reduce(torch.ones(1))",
    "a warning turned into an error": "import warnings\n"
    "with warnings.catch_warnings():\n"
    "    warnings.simplefilter('error')\n"
    "    try: warnings.warn('old') if odd else None\n"
    "    except UserWarning: pass\n"
    "dist.barrier()",
    "an exit that is caught": "try: sys.exit(0)\n"
    "except SystemExit: dist.barrier()",
}  # fmt: skip

COLLECTIVES = {
    # All collectives in all their forms.
    "an all_gather into one tensor": "out = torch.empty(8)\n"
    "dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))\n"
    "assert out.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]",
    "a reduce_scatter of a list": "out = torch.empty(2)\n"
    "dist.reduce_scatter(out, [torch.full((2,), float(n)) for n in range(4)])\n"
    "assert out.tolist() == [4.0 * rank] * 2",
    "a reduce_scatter of a tensor": "out = torch.empty(2)\n"
    "dist.reduce_scatter_tensor(out, torch.arange(8.0))\n"
    "assert out.tolist() == [8.0 * rank, 8.0 * rank + 4]",
    "a scatter of a list": "out = torch.empty(3)\n"
    "dist.scatter(out, [torch.full((3,), float(n)) for n in range(4)] if rank == 1 else None, src=1)\n"
    "assert out.tolist() == [rank] * 3",
    "a gather to a list": "found = [torch.empty(2) for _ in range(4)] if odd else None\n"
    "dist.gather(torch.full((2,), float(rank)), found, dst=2)\n"
    "assert not odd or found[3].tolist() == [3, 3]",
    "tokens to experts": "counts = torch.tensor([(rank + n) % 3 for n in range(4)])\n"
    "wanted = torch.empty_like(counts)\n"
    "dist.all_to_all_single(wanted, counts)\n"
    "got = torch.empty(int(wanted.sum()), 5)\n"
    "dist.all_to_all_single(got, torch.ones(int(counts.sum()), 5), wanted.tolist(), counts.tolist())\n"
    "back = torch.empty(int(counts.sum()), 5)\n"
    "dist.all_to_all_single(back, got, counts.tolist(), wanted.tolist())\n"
    "assert back.sum() == counts.sum() * 5",
    "objects that are scattered": "out = [None]\n"
    "dist.scatter_object_list(out, [{'part': n} for n in range(4)] if rank == 0 else None, src=0)\n"
    "assert out == [{'part': rank}]",
    "objects to the last": "found = [None] * 4 if rank == 3 else None\n"
    "dist.gather_object({'rank': rank, 'text': 'x' * rank}, found, dst=3)\n"
    "assert rank != 3 or found[2]['text'] == 'xx'",
    "objects that say how they are pickled": "class Point:\n"
    "    def __init__(self, n): self.n = n\n"
    "    def __reduce__(self): return (complex, (self.n, 1))\n"
    "found = [None] * 4\n"
    "dist.all_gather_object(found, Point(rank))\n"
    "assert found[3] == 3 + 1j",
    "large objects": "found = [None] * 4\n"
    "dist.all_gather_object(found, bytes(10_000_000 if odd else 1000))\n"
    "assert len(found[2]) == 10_000_000",
    "a large tensor": "t = torch.ones(5_000_000)\n"
    "dist.all_reduce(t)\n"
    "assert t[-1] == 4",
    "several that are coalesced": "ts = [torch.ones(2), torch.ones(3, 3)]\n"
    "dist.all_reduce_coalesced(ts)\n"
    "assert ts[1].sum() == 36",
    "asynchronous ones of all kinds": "out, t = torch.empty(8), torch.ones(2)\n"
    "works = [dist.all_reduce(torch.ones(3), async_op=True), dist.broadcast(torch.ones(1), 3, async_op=True), dist.all_gather_into_tensor(out, t, async_op=True), dist.reduce(torch.ones(2), 1, async_op=True), dist.barrier(async_op=True)]\n"
    "for work in works: work.wait()",
    "works that are asked until they are done": "work = dist.all_reduce(torch.ones(2), async_op=True)\n"
    "while not work.is_completed(): time.sleep(0.001)\n"
    "work.wait()",
    "what follows a work": "work = dist.all_reduce(torch.full((2,), rank + 1.0), async_op=True)\n"
    "half = work.get_future().then(lambda future: future.value()[0] / 4)\n"
    "assert half.wait().tolist() == [2.5, 2.5]",
    "futures that are collected": "futures = [dist.all_reduce(torch.ones(2), async_op=True).get_future() for _ in range(3)]\n"
    "assert len(torch.futures.wait_all(futures)) == 3",
    "all reductions": "for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX): dist.all_reduce(torch.ones(3), op=op)\n"
    "for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR): dist.all_reduce(torch.ones(3, dtype=torch.int64), op=op)",
    "all dtypes": "for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64): dist.all_reduce(torch.ones(3, dtype=dtype))",
    "complex numbers": "t = torch.full((2,), 1 + 1j)\n"
    "dist.all_reduce(t)\n"
    "assert t[0] == 4 + 4j",
    "truth values": "t = torch.tensor([odd, True])\n"
    "dist.broadcast(t, 2)\n"
    "found = [torch.empty(2, dtype=torch.bool) for _ in range(4)]\n"
    "dist.all_gather(found, t)\n"
    "assert all(f.all() for f in found)",
    "a tensor without dimensions": "t = torch.tensor(3.0)\n"
    "dist.broadcast(t, 1)\n"
    "dist.all_reduce(t)\n"
    "assert t == 12",
    "parts of a tensor": "whole = torch.zeros(4, 6)\n"
    "whole[rank] = rank + 1\n"
    "dist.all_reduce(whole[:, 2:4].contiguous())\n"
    "dist.broadcast(whole[1], 1)",
    "a transposed tensor": "t = torch.arange(6.0).reshape(2, 3).t()\n"
    "dist.all_reduce(t)\n"
    "assert t[2, 1] == 20",
    "the same tensor twice": "t = torch.ones(2)\n"
    "for _ in range(2): dist.all_reduce(t)\n"
    "dist.broadcast(t, 0); dist.broadcast(t, 1)\n"
    "assert t[0] == 16",
    "without gradients": "with torch.no_grad(): dist.all_reduce(torch.ones(2, requires_grad=True) * 1)\n"
    "with torch.inference_mode(): dist.all_reduce(torch.ones(2))",
    "parameters that are averaged by hand": "net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))\n"
    "net(x * rank).sum().backward()\n"
    "for p in net.parameters(): dist.all_reduce(p.grad); p.grad /= 4",
    "parameters as one vector": "net = nn.Linear(4, 4)\n"
    "flat = nn.utils.parameters_to_vector(net.parameters()).detach()\n"
    "dist.broadcast(flat, 0)\n"
    "nn.utils.vector_to_parameters(flat, net.parameters())",
    "gradients that are reduced by hooks": "net = nn.Linear(4, 4)\n"
    "works = []\n"
    "for p in net.parameters(): p.register_hook(lambda grad: works.append(dist.all_reduce(grad, async_op=True)))\n"
    "net(x).sum().backward()\n"
    "for work in works: work.wait()",
    "a hundred small ones": "works = [dist.all_reduce(torch.ones(n % 7 + 1), async_op=True) for n in range(100)]\n"
    "for work in works: work.wait()",
    "shapes that change from step to step": "for n in (1, 5, 2, 8): dist.all_reduce(torch.ones(n, n)); dist.all_gather([torch.empty(n) for _ in range(4)], torch.ones(n))",
    "a barrier with a limit": "from datetime import timedelta\n"
    "if odd: time.sleep(0.5)\n"
    "dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)",
    "means by the functional ones": "t = functional.all_reduce(torch.full((2,), float(rank)), 'avg', dist.group.WORLD)\n"
    "assert t.tolist() == [1.5, 1.5]",
    "a functional gather and scatter": "t = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, other)\n"
    "assert t.shape == (8,)\n"
    "t = functional.reduce_scatter_tensor(torch.ones(8), 'sum', 0, other)\n"
    "assert t.tolist() == [4, 4]",
    "a functional one that nobody looks at": "functional.all_reduce(torch.ones(2), 'sum', other)\n"
    "dist.barrier()",
    "a functional all_to_all": "t = functional.all_to_all_single(torch.arange(4.0) + rank, None, None, other)\n"
    "assert t.tolist() == [float(rank + n) for n in range(4)]",
    "gradients through functional ones": "w = torch.ones(4, requires_grad=True)\n"
    "total = functional.all_gather_tensor_autograd(w * (rank + 1), 0, other)\n"
    "total.sum().backward()\n"
    "assert w.grad.sum() == 16 * (rank + 1)",
    "gradients through torch.distributed.nn": "import torch.distributed.nn as dnn\n"
    "w = torch.ones(2, requires_grad=True)\n"
    "dnn.all_reduce(w * rank).sum().backward()\n"
    "found = dnn.all_gather(torch.ones(2, requires_grad=True) * rank)\n"
    "assert len(found) == 4",
    "a broadcast within autograd": "class Sum(torch.autograd.Function):\n"
    "    @staticmethod\n"
    "    def forward(ctx, t): t = t.clone(); dist.all_reduce(t); return t\n"
    "    @staticmethod\n"
    "    def backward(ctx, grad): grad = grad.clone(); dist.all_reduce(grad); return grad\n"
    "w = torch.ones(2, requires_grad=True)\n"
    "Sum.apply(w * 2).sum().backward()\n"
    "assert w.grad.tolist() == [8, 8]",
    "vmap beside an all_reduce": "t = torch.func.vmap(lambda a: a * 2)(torch.ones(3, 2))\n"
    "grads = torch.func.vmap(torch.func.grad(lambda a: (a ** 2).sum()))(t)\n"
    "dist.all_reduce(grads)\n"
    "assert grads[0, 0] == 16",
    "a compiled step": "@torch.compile(backend='eager')\n"
    "def step(t): return functional.all_reduce(t * 2, 'sum', other).sum()\n"
    "assert step(torch.ones(3)) == 24",
}  # fmt: skip

MESSAGES = {
    # Sends and receives.
    "tags that pair": "if rank == 0:\n"
    "    works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (7, 8, 9)]\n"
    "    for work in works: work.wait()\n"
    "if rank == 1:\n"
    "    found = {tag: torch.empty(2) for tag in (9, 7, 8)}\n"
    "    works = [dist.irecv(t, 0, tag=tag) for tag, t in found.items()]\n"
    "    for work in works: work.wait()\n"
    "    assert all(t[0] == tag for tag, t in found.items())",
    "who it was that sent": "if rank == 0: assert {dist.recv(torch.empty(1)) for _ in range(3)} == {1, 2, 3}\n"
    "else: time.sleep(0.2 * (3 - rank)); dist.send(torch.ones(1), 0)",
    "a large message": "t = torch.ones(5_000_000)\n"
    "if rank == 0: dist.send(t, 3)\n"
    "if rank == 3: dist.recv(t, 0)",
    "objects to a peer": "got = [None, None]\n"
    "if rank == 1: dist.send_object_list(['text', {'n': 1}], dst=2)\n"
    "if rank == 2: dist.recv_object_list(got, src=1); assert got == ['text', {'n': 1}]",
    "a token around a ring": "t = torch.zeros(1)\n"
    "if rank == 0: dist.send(t, 1); dist.recv(t, 3); assert t == 3\n"
    "else: dist.recv(t, rank - 1); t += 1; dist.send(t, (rank + 1) % 4)",
    "an all_reduce by hand": "mine, t = torch.full((2,), float(rank)), torch.full((2,), float(rank))\n"
    "for _ in range(3):\n"
    "    got = torch.empty(2)\n"
    "    works = [dist.isend(t, (rank + 1) % 4), dist.irecv(got, (rank - 1) % 4)]\n"
    "    for work in works: work.wait()\n"
    "    mine += got; t = got\n"
    "assert mine.tolist() == [6, 6]",
    "a tree": "t = torch.full((1,), rank + 1.0)\n"
    "if rank in (1, 3): dist.send(t, rank - 1)\n"
    "else: got = torch.empty(1); dist.recv(got, rank + 1); t += got\n"
    "if rank == 2: dist.send(t, 0)\n"
    "if rank == 0: dist.recv(got, 2); assert t + got == 10",
    "edges of a grid": "field = torch.full((6,), float(rank))\n"
    "ops = []\n"
    "if rank > 0: ops += [dist.P2POp(dist.isend, field[1:2], rank - 1), dist.P2POp(dist.irecv, field[0:1], rank - 1)]\n"
    "if rank < 3: ops += [dist.P2POp(dist.isend, field[4:5], rank + 1), dist.P2POp(dist.irecv, field[5:6], rank + 1)]\n"
    "for work in dist.batch_isend_irecv(ops): work.wait()\n"
    "assert rank in (0, 3) or field[[0, 5]].tolist() == [rank - 1, rank + 1]",
    "a pipeline": "for batch in range(4):\n"
    "    t = torch.full((2,), float(batch))\n"
    "    if rank > 0: dist.recv(t, rank - 1)\n"
    "    t = t + 1\n"
    "    if rank < 3: dist.send(t, rank + 1)\n"
    "    else: assert t[0] == batch + 4",
    "a pipeline that goes forward and back": "sent, behind = [], 3 - rank\n"
    "def forward():\n"
    "    t = torch.ones(3)\n"
    "    if rank > 0: dist.recv(t, rank - 1, tag=1)\n"
    "    if rank < 3: sent.append(dist.isend(t, rank + 1, tag=1))\n"
    "def backward():\n"
    "    g = torch.ones(3)\n"
    "    if rank < 3: dist.recv(g, rank + 1, tag=2)\n"
    "    if rank > 0: sent.append(dist.isend(g, rank - 1, tag=2))\n"
    "for _ in range(behind): forward()\n"
    "for _ in range(6 - behind): forward(); backward()\n"
    "for _ in range(behind): backward()\n"
    "for work in sent: work.wait()",
    "a server of parameters": "if rank == 0:\n"
    "    w, got = torch.zeros(2), torch.empty(2)\n"
    "    for _ in range(6): who = dist.recv(got); w += got; dist.send(w, who)\n"
    "else:\n"
    "    for step in range(2): dist.send(torch.ones(2), 0); time.sleep(0.05 * rank); dist.recv(torch.empty(2), 0)",
    "work that is handed out": "if rank == 0:\n"
    "    tasks, ended = list(range(8)), 0\n"
    "    while ended < 3:\n"
    "        who = dist.recv(torch.empty(1))\n"
    "        task = tasks.pop() if tasks else -1\n"
    "        ended += task < 0\n"
    "        dist.send(torch.tensor([float(task)]), who)\n"
    "else:\n"
    "    task = torch.zeros(1)\n"
    "    while task >= 0: dist.send(task, 0); dist.recv(task, 0); time.sleep(0.02 * rank)",
    "a size, then what it is of": "if rank == 3: t = torch.arange(7.0); dist.send(torch.tensor([len(t)]), 0); dist.send(t, 0)\n"
    "if rank == 0:\n"
    "    size = torch.empty(1, dtype=torch.int64)\n"
    "    dist.recv(size, 3)\n"
    "    t = torch.empty(int(size)); dist.recv(t, 3)\n"
    "    assert t.sum() == 21",
    "messages in a group": "if rank >= 2:\n"
    "    t = torch.tensor([float(rank)])\n"
    "    dist.send(t, group=halves[1], group_dst=0) if rank == 3 else dist.recv(t, group=halves[1], group_src=1)\n"
    "    assert t == 3",
    "messages and reductions in turn": "for step in range(3):\n"
    "    t = torch.ones(1)\n"
    "    if rank == 0: dist.send(t, 3)\n"
    "    if rank == 3: dist.recv(t, 0)\n"
    "    dist.all_reduce(t)",
    "receives that are posted early": "got = torch.empty(2)\n"
    "work = dist.irecv(got, (rank + 1) % 4)\n"
    "dist.all_reduce(torch.ones(2))\n"
    "dist.send(torch.ones(2), (rank - 1) % 4)\n"
    "work.wait()",
    "an exchange of pairs in another order": "got = torch.empty(3)\n"
    "for step in (1, 2, 3):\n"
    "    peer = rank ^ step\n"
    "    if rank < peer: dist.send(torch.ones(3), peer); dist.recv(got, peer)\n"
    "    else: dist.recv(got, peer); dist.send(torch.ones(3), peer)",
    "keys and values around a ring": "k = torch.full((2, 4), float(rank))\n"
    "seen = {rank}\n"
    "for _ in range(3):\n"
    "    got = torch.empty_like(k)\n"
    "    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, k, (rank + 1) % 4), dist.P2POp(dist.irecv, got, (rank - 1) % 4)]): work.wait()\n"
    "    k = got; seen.add(int(k[0, 0]))\n"
    "assert seen == {0, 1, 2, 3}",
}  # fmt: skip

GROUPS = {
    # Groups, in whatever order and number. Local ones come first: torch names them after how many
    # groups a process has, which is the same for their members only here.
    "groups within a group": "if rank < 2:\n"
    "    inner = [dist.new_group([n], use_local_synchronization=True) for n in (0, 1) if n == rank]\n"
    "    dist.all_reduce(torch.ones(1), group=inner[0])\n"
    "    dist.barrier(group=halves[0])",
    "local groups of pairs": "mine = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)\n"
    "t = torch.ones(1)\n"
    "dist.all_reduce(t, group=mine)\n"
    "assert t == 2",
    "groups of rows and columns": "rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]\n"
    "columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]\n"
    "t = torch.ones(1)\n"
    "dist.all_reduce(t, group=rows[rank // 2])\n"
    "dist.all_reduce(t, group=columns[rank % 2])\n"
    "assert t == 4",
    "subgroups": "mine, all_of_them = dist.new_subgroups(group_size=2)\n"
    "dist.all_reduce(torch.ones(2), group=mine)\n"
    "for group in all_of_them:\n"
    "    if dist.get_rank(group) >= 0: dist.destroy_process_group(group)",
    "subgroups that are named": "mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])\n"
    "t = torch.tensor([float(rank)])\n"
    "dist.all_reduce(t, group=mine)\n"
    "assert t == 3",
    "overlapping groups": "low, high = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])\n"
    "if rank < 3: dist.all_reduce(torch.ones(1), group=low)\n"
    "if rank > 0: dist.all_reduce(torch.ones(1), group=high)",
    "a chain of overlapping groups": "links = [dist.new_group([n, n + 1]) for n in range(3)]\n"
    "for n, link in enumerate(links):\n"
    "    if rank in (n, n + 1): dist.all_reduce(torch.ones(1), group=link)",
    "a group of one": "alone = [dist.new_group([n]) for n in range(4)][rank]\n"
    "t = torch.ones(2)\n"
    "dist.all_reduce(t, group=alone); dist.broadcast(t, rank, group=alone)\n"
    "assert t[0] == 1",
    "a group that is made again and again": "for n in range(4):\n"
    "    group = dist.new_group([0, 1, 2, 3])\n"
    "    dist.all_reduce(torch.ones(n + 1), group=group)\n"
    "    dist.destroy_process_group(group)",
    "many groups": "groups = [dist.new_group([0, 1, 2, 3]) for _ in range(8)]\n"
    "for group in reversed(groups): dist.all_reduce(torch.ones(1), group=group)",
    "groups at other times": "for n in range(3) if rank < 2 else range(5): dist.all_reduce(torch.ones(n + 1), group=halves[rank // 2])",
    "members in another order": "group = dist.new_group([3, 2, 1, 0])\n"
    "t = torch.tensor([float(rank)])\n"
    "dist.broadcast(t, group_src=0, group=group)\n"
    "assert t == 0 or t == 3",
    "roots within a group": "t = torch.full((1,), float(rank))\n"
    "dist.broadcast(t, group=halves[rank // 2], group_src=1)\n"
    "assert t == rank // 2 * 2 + 1\n"
    "dist.reduce(t, group=halves[rank // 2], group_dst=0)",
    "a gather in a half, a scatter in the other": "if rank < 2: dist.gather(torch.ones(1), [torch.empty(1)] * 2 if rank == 1 else None, dst=1, group=halves[0])\n"
    "else: dist.scatter(torch.empty(1), [torch.ones(1)] * 2 if rank == 2 else None, src=2, group=halves[1])",
    "a reduction within hosts, then between": "t = torch.tensor([rank + 1.0])\n"
    "leaders = dist.new_group([0, 2])\n"
    "dist.reduce(t, rank // 2 * 2, group=halves[rank // 2])\n"
    "if rank % 2 == 0: dist.all_reduce(t, group=leaders)\n"
    "dist.broadcast(t, rank // 2 * 2, group=halves[rank // 2])\n"
    "assert t == 10",
    "who calls for a group that it is not in": "t = torch.ones(1)\n"
    "dist.all_reduce(t, group=halves[0])\n"
    "dist.all_reduce(t, group=halves[1])\n"
    "assert t == 2",
    "a group with a limit and a name": "from datetime import timedelta\n"
    "group = dist.new_group([0, 2], timeout=timedelta(seconds=30), group_desc='leaders')\n"
    "if odd: time.sleep(0.5)\n"
    "if rank in (0, 2): dist.barrier(group=group)",
    "an own group beside the session's": "group = dist.new_group(backend='gloo')\n"
    "dist.all_reduce(torch.ones(1), group=group); dist.all_reduce(torch.ones(1))\n"
    "assert dist.get_world_size(group) == 4 and dist.get_process_group_ranks(group) == [0, 1, 2, 3]",
    "ranks that are translated": "group = halves[rank // 2]\n"
    "peer = dist.get_global_rank(group, 1 - dist.get_rank(group))\n"
    "t = torch.tensor([float(rank)])\n"
    "dist.broadcast(t, dist.get_global_rank(group, 0), group=group)\n"
    "assert peer == rank ^ 1",
    "works of two groups that cross": "groups = [other, None] if odd else [None, other]\n"
    "works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]\n"
    "for work in works: work.wait()",
}  # fmt: skip

MODELS = {
    # Meshes, DTensors, and what wraps a model.
    "a mesh and its slices": "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
    "t = torch.tensor([float(rank)])\n"
    "dist.all_reduce(t, group=mesh['tp'].get_group())\n"
    "dist.all_reduce(t, group=mesh['dp'].get_group())\n"
    "assert t == 6 and list(mesh.get_coordinate()) == [rank // 2, rank % 2]",
    "a mesh of three dimensions": "mesh = dist.init_device_mesh('cpu', (2, 1, 2), mesh_dim_names=('pp', 'dp', 'tp'))\n"
    "for name in ('pp', 'dp', 'tp'): dist.all_reduce(torch.ones(1), group=mesh.get_group(name))",
    "a mesh that is flattened": "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))\n"
    "flat = mesh['a', 'b']._flatten('ab')\n"
    "t = torch.ones(1)\n"
    "dist.all_reduce(t, group=flat.get_group())\n"
    "assert t == 4",
    "a DTensor that is redistributed": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "t = dt.distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [dt.Shard(0)])\n"
    "assert torch.equal(t.redistribute(mesh, [dt.Shard(1)]).full_tensor(), torch.arange(16.0).reshape(4, 4))",
    "a DTensor that is uneven": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "t = dt.distribute_tensor(torch.arange(10.0), mesh, [dt.Shard(0)])\n"
    "assert (t * 2).sum().full_tensor() == 90",
    "a product of DTensors": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (2, 2))\n"
    "a = dt.distribute_tensor(torch.eye(4), mesh, [dt.Shard(0), dt.Replicate()])\n"
    "b = dt.distribute_tensor(torch.ones(4, 4), mesh, [dt.Replicate(), dt.Shard(1)])\n"
    "assert (a @ b).full_tensor().sum() == 16",
    "parts of sums as a DTensor": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "t = dt.DTensor.from_local(torch.ones(3), mesh, [dt.Partial()])\n"
    "assert t.full_tensor().tolist() == [4, 4, 4]",
    "a tensor-parallel model": "from torch.distributed.tensor import parallel as tp\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))\n"
    "net = tp.parallelize_module(net, mesh, {'0': tp.ColwiseParallel(), '2': tp.RowwiseParallel()})\n"
    "net(x).sum().backward()",
    "a sequence-parallel model": "from torch.distributed import tensor as dt\n"
    "from torch.distributed.tensor import parallel as tp\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4))\n"
    "plan = {'0': tp.SequenceParallel(), '1': tp.ColwiseParallel(input_layouts=dt.Shard(1)), '2': tp.RowwiseParallel(output_layouts=dt.Shard(1))}\n"
    "tp.parallelize_module(net, mesh, plan)(torch.ones(2, 1, 4)).sum().backward()",
    "FSDP2 in layers, with a step": "from torch.distributed.fsdp import fully_shard\n"
    "net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])\n"
    "for layer in net: fully_shard(layer)\n"
    "fully_shard(net)\n"
    "optimizer = torch.optim.AdamW(net.parameters())\n"
    "for _ in range(2):\n"
    "    net(x).sum().backward()\n"
    "    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
    "    optimizer.step(); optimizer.zero_grad()",
    "FSDP2 over replicas": "from torch.distributed.fsdp import fully_shard\n"
    "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))\n"
    "net = fully_shard(nn.Linear(4, 4), mesh=mesh)\n"
    "net(x).sum().backward()",
    "FSDP2 that accumulates": "from torch.distributed.fsdp import fully_shard\n"
    "net = fully_shard(nn.Linear(4, 4))\n"
    "for n in range(3):\n"
    "    net.set_requires_gradient_sync(n == 2)\n"
    "    net(x).sum().backward()",
    "FSDP2 beside tensor parallelism": "from torch.distributed.fsdp import fully_shard\n"
    "from torch.distributed.tensor import parallel as tp\n"
    "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
    "net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))\n"
    "tp.parallelize_module(net, mesh['tp'], {'0': tp.ColwiseParallel(), '1': tp.RowwiseParallel()})\n"
    "fully_shard(net, mesh=mesh['dp'])\n"
    "net(x).sum().backward()",
    "FSDP1": "from torch.distributed.fsdp import FullyShardedDataParallel\n"
    "net = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device('cpu'))\n"
    "net(x).sum().backward()\n"
    "net.clip_grad_norm_(1.0)",
    "DDP that is told its graph": "net = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), static_graph=True)\n"
    "for _ in range(3): net(x).sum().backward()",
    "DDP with views and tiny buckets": "net = DDP(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), gradient_as_bucket_view=True, bucket_cap_mb=0.00001)\n"
    "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    "for _ in range(3): net(x).sum().backward(); optimizer.step(); optimizer.zero_grad(set_to_none=True)",
    "DDP with halves on the wire": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "net = model()\n"
    "net.register_comm_hook(None, default_hooks.fp16_compress_hook)\n"
    "for _ in range(2): net(x).sum().backward()",
    "DDP with gradients of low rank": "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power\n"
    "net = DDP(nn.Linear(32, 32))\n"
    "net.register_comm_hook(power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), power.powerSGD_hook)\n"
    "for _ in range(4): net(torch.ones(2, 32)).sum().backward()",
    "DDP with a hook by hand": "def hook(group, bucket):\n"
    "    t = bucket.buffer().div_(4)\n"
    "    return dist.all_reduce(t, group=group, async_op=True).get_future().then(lambda future: future.value()[0])\n"
    "net = model()\n"
    "net.register_comm_hook(other, hook)\n"
    "for _ in range(2): net(x).sum().backward()",
    "two DDP models in turn": "nets = [model(), model()]\n"
    "for step in range(4): nets[step % 2](x).sum().backward()\n"
    "(nets[0](x).sum() + nets[1](x).sum()).backward()",
    "DDP with buffers": "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.linear = nn.Linear(4, 4)\n"
    "        self.register_buffer('seen', torch.zeros(1, dtype=torch.int64))\n"
    "    def forward(self, t): self.seen += len(t); return self.linear(t)\n"
    "net = DDP(nn.Sequential(Net(), nn.BatchNorm1d(4)))\n"
    "for n in range(3): net(torch.randn(2 + rank, 4)).sum().backward()",
    "DDP that rank 0 evaluates by its module": "net = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))\n"
    "net(x).sum().backward()\n"
    "if rank == 0:\n"
    "    with torch.no_grad(): net.module.eval()(x)\n"
    "    net.module.train()\n"
    "dist.barrier()\n"
    "net(x).sum().backward()",
    "DDP in a function, with its own group": "def train(group):\n"
    "    net = DDP(nn.Linear(4, 4), process_group=group)\n"
    "    for _ in range(1 + dist.get_process_group_ranks(group)[0]): net(x).sum().backward()\n"
    "train(halves[rank // 2])",
    "DDP with layers that are computed twice": "from torch.utils.checkpoint import checkpoint\n"
    "inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())\n"
    "class Net(nn.Module):\n"
    "    def __init__(self): super().__init__(); self.inner = inner\n"
    "    def forward(self, t): return checkpoint(self.inner, t, use_reentrant=False)\n"
    "net = DDP(Net())\n"
    "for _ in range(2): net(x.clone().requires_grad_()).sum().backward()",
    "DDP with parts that are frozen": "net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
    "net[0].requires_grad_(False)\n"
    "net = DDP(net)\n"
    "for _ in range(2): net(x).sum().backward()",
    "DDP whose ranks branch within the model": "class Net(nn.Module):\n"
    "    def __init__(self): super().__init__(); self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])\n"
    "    def forward(self, t): return self.parts[rank % 2](t)\n"
    "net = DDP(Net(), find_unused_parameters=True)\n"
    "for _ in range(2): net(x).sum().backward()",
    "DDP with accumulation that is uneven in work": "net = model()\n"
    "for step in range(4):\n"
    "    with net.no_sync() if step % 2 == 0 else contextlib.nullcontext():\n"
    "        for _ in range(rank + 1 if step % 2 == 0 else 1): net(x).sum().backward()",
    "a batch norm over all ranks": "def norm(t):\n"
    "    both = torch.stack([t.mean(0), (t ** 2).mean(0)])\n"
    "    both = functional.all_reduce(both, 'avg', other)\n"
    "    return (t - both[0]) / (both[1] - both[0] ** 2 + 1e-5).sqrt()\n"
    "assert norm(torch.full((2, 4), float(rank))).shape == (2, 4)",
    "uneven inputs of a model and an optimizer": "from torch.distributed.algorithms.join import Join\n"
    "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
    "net = model()\n"
    "optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)\n"
    "with Join([net, optimizer]):\n"
    "    for _ in range(1 + rank): optimizer.zero_grad(); net(x).sum().backward(); optimizer.step()",
    "an optimizer in parts, saved by one": "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
    "net = DDP(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))\n"
    "optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)\n"
    "for _ in range(2): net(x).sum().backward(); optimizer.step()\n"
    "optimizer.consolidate_state_dict(to=0)\n"
    "if rank == 0: saved = optimizer.state_dict()",
    "models that are averaged now and then": "from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
    "net = nn.Linear(4, 4)\n"
    "averager = PeriodicModelAverager(period=2, warmup_steps=1)\n"
    "for _ in range(5):\n"
    "    net(x * rank).sum().backward()\n"
    "    averager.average_parameters(net.parameters())",
    "steps that are local after a while": "from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local\n"
    "from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
    "from torch.distributed.optim import PostLocalSGDOptimizer\n"
    "net = model()\n"
    "net.register_comm_hook(local.PostLocalSGDState(None, halves[rank // 2], start_localSGD_iter=2), local.post_localSGD_hook)\n"
    "optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=2))\n"
    "for _ in range(5): optimizer.zero_grad(); net(x).sum().backward(); optimizer.step()",
    "a checkpoint of all ranks": "import torch.distributed.checkpoint as dcp\n"
    "path = os.path.join(tempfile.gettempdir(), f\"dcp-{os.environ['MASTER_PORT']}\")\n"
    "net = model()\n"
    "dcp.save({'net': net.state_dict(), 'rank0': rank == 0}, checkpoint_id=path)\n"
    "dcp.load({'net': net.state_dict()}, checkpoint_id=path)",
    "a checkpoint in the background": "import torch.distributed.checkpoint as dcp\n"
    "path = os.path.join(tempfile.gettempdir(), f\"async-{os.environ['MASTER_PORT']}\")\n"
    "future = dcp.async_save({'t': torch.ones(4)}, checkpoint_id=path, process_group=other)\n"
    "for _ in range(3): dist.all_reduce(torch.ones(2))\n"
    "future.result()",
    "a checkpoint of shards": "import torch.distributed.checkpoint as dcp\n"
    "from torch.distributed.checkpoint.state_dict import get_model_state_dict\n"
    "from torch.distributed.fsdp import fully_shard\n"
    "path = os.path.join(tempfile.gettempdir(), f\"shards-{os.environ['MASTER_PORT']}\")\n"
    "net = fully_shard(nn.Linear(4, 4))\n"
    "state = get_model_state_dict(net)\n"
    "dcp.save(state, checkpoint_id=path)\n"
    "dcp.load(state, checkpoint_id=path)",
    "a pipeline of torch's": "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\n"
    "stage = PipelineStage(nn.Linear(4, 4), rank, 4, torch.device('cpu'))\n"
    "schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: ((out - target) ** 2).sum())\n"
    "schedule.step(*[torch.ones(8, 4)] * (rank == 0), **({'target': torch.ones(8, 4)} if rank == 3 else {}))",
    "a pipeline of torch's in 1F1B": "from torch.distributed.pipelining import PipelineStage, Schedule1F1B\n"
    "stage = PipelineStage(nn.Linear(4, 4), rank, 4, torch.device('cpu'))\n"
    "schedule = Schedule1F1B(stage, 8, loss_fn=lambda out, target: ((out - target) ** 2).sum())\n"
    "schedule.step(*[torch.ones(8, 4)] * (rank == 0), **({'target': torch.ones(8, 4)} if rank == 3 else {}))",
    "a sampler of uneven data": "sampler = data.distributed.DistributedSampler(range(10), shuffle=True, drop_last=True)\n"
    "loader = data.DataLoader(range(10), batch_size=2, sampler=sampler)\n"
    "for epoch in range(2):\n"
    "    sampler.set_epoch(epoch)\n"
    "    for batch in loader: dist.all_reduce(batch.sum())",
    "workers that stay": "loader = data.DataLoader(range(8), batch_size=4, num_workers=2, persistent_workers=True)\n"
    "for epoch in range(2):\n"
    "    for batch in loader: dist.all_reduce(batch)",
    "a stream that workers share": "class Stream(data.IterableDataset):\n"
    "    def __iter__(self): info = data.get_worker_info(); return iter(range(info.id, 8, info.num_workers))\n"
    "for batch in data.DataLoader(Stream(), batch_size=2, num_workers=2): dist.all_reduce(batch)",
}  # fmt: skip

STORES = {
    # Keys that ranks set and wait for.
    "a store of its own": "store = dist.PrefixStore('mine', dist.distributed_c10d._get_default_store())\n"
    "store.set(f'at {rank}', str(rank))\n"
    "store.wait([f'at {n}' for n in range(4)])\n"
    "assert store.multi_get(['at 0', 'at 3']) == [b'0', b'3']\n"
    "dist.barrier()",
    "a counter": "store = dist.PrefixStore('counter', dist.distributed_c10d._get_default_store())\n"
    "store.add('came', 1)\n"
    "while store.add('came', 0) < 4: time.sleep(0.01)\n"
    "dist.barrier()",
    "who is first": "store = dist.PrefixStore('first', dist.distributed_c10d._get_default_store())\n"
    "won = store.compare_set('leader', '', str(rank)) == str(rank).encode()\n"
    "flag = torch.tensor(int(won))\n"
    "dist.all_reduce(flag)\n"
    "assert flag == 1",
    "a store on a port of its own": "port = [0]\n"
    "if rank == 0: server = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); port = [server.port]\n"
    "dist.broadcast_object_list(port)\n"
    "store = server if rank == 0 else dist.TCPStore('127.0.0.1', port[0])\n"
    "if odd: time.sleep(0.5); store.set('ready', 'yes')\n"
    "assert store.get('ready') == b'yes'\n"
    "dist.barrier()",
    "a store in a file": "path = [tempfile.mktemp()]\n"
    "dist.broadcast_object_list(path)\n"
    "store = dist.FileStore(path[0], 4)\n"
    "if odd: time.sleep(0.4); store.set('k', 'v')\n"
    "assert store.get('k') == b'v'\n"
    "dist.barrier()",
    "a store in memory": "store = dist.HashStore()\n"
    "store.set('k', 'v')\n"
    "assert store.get('k') == b'v' and store.add('n', 2) == 2",
    "a key that a thread sets later": "store = dist.PrefixStore('later', dist.distributed_c10d._get_default_store())\n"
    "if odd:\n"
    "    thread = threading.Timer(0.8, store.set, ('k', 'v'))\n"
    "    thread.start()\n"
    "else: store.wait(['k'])\n"
    "dist.barrier()",
    "a key that a thread sets once its rank has ended": "store = dist.PrefixStore('ended', dist.distributed_c10d._get_default_store())\n"
    "if odd: threading.Timer(0.8, store.set, ('k', 'v')).start()\n"
    "else: store.get('k')",
    "a key with a limit that nobody sets": "from datetime import timedelta\n"
    "store = dist.distributed_c10d._get_default_store()\n"
    "try: store.wait(['never'], timedelta(seconds=0.3))\n"
    "except dist.DistStoreError: dist.barrier()",
    "keys that are deleted": "store = dist.PrefixStore('gone', dist.distributed_c10d._get_default_store())\n"
    "store.set(str(rank), 'x')\n"
    "dist.barrier()\n"
    "if rank == 0: store.delete_key('3')\n"
    "dist.barrier()\n"
    "assert not store.check(['3']) and store.check(['0'])",
    "a queue in the store": "store = dist.PrefixStore('queue', dist.distributed_c10d._get_default_store())\n"
    "if rank == 0:\n"
    "    for n in range(3): time.sleep(0.2); store.set(f'task {n + 1}', str(n * n))\n"
    "else: assert store.get(f'task {rank}') == str((rank - 1) ** 2).encode()",
}  # fmt: skip

BESIDE = {
    # Threads, tasks, processes and signals beside operations.
    "all operations in one thread": "def work(group=other):\n"
    "    for _ in range(3): dist.all_reduce(torch.ones(2), group=group)\n"
    "with ThreadPoolExecutor(1) as pool: pool.submit(work).result()",
    "a group for each thread": "groups = [dist.new_group([0, 1, 2, 3]) for _ in range(3)]\n"
    "def work(group):\n"
    "    for _ in range(4): dist.all_reduce(torch.ones(2), group=group)\n"
    "with ThreadPoolExecutor(3) as pool: list(pool.map(work, groups))",
    "a thread that fetches ahead": "batches = queue.Queue(2)\n"
    "def fetch():\n"
    "    for n in range(5): t = torch.full((2,), float(n)); dist.broadcast(t, 0, group=other); batches.put(t)\n"
    "    batches.put(None)\n"
    "threading.Thread(target=fetch).start()\n"
    "while (batch := batches.get()) is not None: dist.all_reduce(batch)",
    "a thread that outlasts the cell on one rank": "def late(t=torch.ones(2)):\n"
    "    time.sleep(0.8)\n"
    "    dist.send(t, 3)\n"
    "if odd: threading.Thread(target=late).start()\n"
    "if rank == 3: dist.recv(torch.empty(2), 2)",
    "a pool whose last work outlasts the cell": "pool = ThreadPoolExecutor(1)\n"
    "def late(t=torch.ones(2)): time.sleep(0.8 if odd else 0); dist.all_reduce(t, group=other)\n"
    "future = pool.submit(late)\n"
    "if not odd: future.result()",
    "a thread of one rank that answers later than the cell ends": "def answer(t=torch.empty(1)):\n"
    "    dist.recv(t, 3)\n"
    "    time.sleep(0.8)\n"
    "    dist.send(t, 3)\n"
    "if odd: threading.Thread(target=answer).start()\n"
    "if rank == 3: dist.send(torch.ones(1), 2); dist.recv(torch.empty(1), 2)",
    "a thread of asyncio that outlasts the cell": "async def begin(t=torch.ones(2)):\n"
    "    def late(): time.sleep(0.6); dist.send(t, 1)\n"
    "    asyncio.get_running_loop().run_in_executor(None, late)\n"
    "if odd: await begin()\n"
    "if rank == 1: dist.recv(torch.empty(2), 2)",
    "a thread that reduces while the main thread sleeps": "def work(): dist.all_reduce(torch.ones(2), group=other)\n"
    "thread = threading.Thread(target=work); thread.start()\n"
    "time.sleep(0.1 * rank)\n"
    "thread.join()",
    "a heartbeat": "beats, end = [], threading.Event()\n"
    "def beat():\n"
    "    while not end.wait(0.05): beats.append(time.time())\n"
    "thread = threading.Thread(target=beat, daemon=True); thread.start()\n"
    "if odd: time.sleep(0.5)\n"
    "dist.barrier()\n"
    "end.set(); thread.join()",
    "an error in a thread that is handed on": "with ThreadPoolExecutor(1) as pool: future = pool.submit(lambda: {}['gone'])\n"
    "assert isinstance(future.exception(), KeyError)\n"
    "dist.barrier()",
    "a condition between threads": "ready = threading.Event()\n"
    "def work(): ready.wait(); dist.all_reduce(torch.ones(1), group=other)\n"
    "thread = threading.Thread(target=work); thread.start()\n"
    "dist.all_reduce(torch.ones(3))\n"
    "ready.set(); thread.join()",
    "an await": "await asyncio.sleep(0.05 * rank)\n"
    "dist.barrier()",
    "tasks that are gathered": "async def step(n): await asyncio.sleep(0.01 * (4 - n)); return n\n"
    "found = await asyncio.gather(*[step(n) for n in range(4)])\n"
    "dist.all_reduce(torch.tensor(found))",
    "a collective in a thread of asyncio": "await asyncio.to_thread(dist.all_reduce, torch.ones(2), group=other)",
    "an async generator": "async def batches():\n"
    "    for n in range(3): await asyncio.sleep(0.01); yield torch.ones(n + 1)\n"
    "async for batch in batches(): dist.all_reduce(batch)",
    "a limit of asyncio that is not reached": "async with asyncio.timeout(10): await asyncio.to_thread(dist.barrier, other)",
    "a limit of asyncio that one rank reaches": "try:\n"
    "    async with asyncio.timeout(0.1): await asyncio.sleep(5 if odd else 0)\n"
    "except TimeoutError: pass\n"
    "dist.barrier()",
    "a program": "import subprocess\n"
    "out = subprocess.run([sys.executable, '-c', 'print(1)'] if odd else ['true'], capture_output=True, check=True)\n"
    "dist.barrier()",
    "a program that fails": "import subprocess\n"
    "code = subprocess.call(['false'] if odd else ['true'])\n"
    "failed = torch.tensor(code)\n"
    "dist.all_reduce(failed)\n"
    "assert failed == 1",
    "a pool of processes": "import multiprocessing\n"
    "with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, range(-3, 0)) == [3, 2, 1]\n"
    "dist.barrier()",
    "a child that is spawned": "import multiprocessing\n"
    "if rank == 0: child = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(0.1,)); child.start(); child.join()\n"
    "dist.barrier()",
    "a child that is ended": "import subprocess\n"
    "child = subprocess.Popen(['sleep', '60'])\n"
    "dist.all_reduce(torch.ones(2))\n"
    "child.terminate(); child.wait()\n"
    "dist.barrier()",
    "an alarm": "rung = []\n"
    "before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
    "if odd: time.sleep(0.5)\n"
    "dist.barrier()\n"
    "signal.signal(signal.SIGALRM, before)",
    "a signal that asks to save": "asked = []\n"
    "before = signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))\n"
    "if odd: os.kill(os.getpid(), signal.SIGUSR1)\n"
    "for step in range(3):\n"
    "    save = torch.tensor(len(asked))\n"
    "    dist.all_reduce(save, op=dist.ReduceOp.MAX)\n"
    "    if save: dist.barrier(); break\n"
    "signal.signal(signal.SIGUSR1, before)",
    "a generator that reduces when it closes": "def steps():\n"
    "    try: yield from range(3)\n"
    "    finally: dist.barrier()\n"
    "found = [step for step in steps()]",
    "a decorator that meets": "def meets(call):\n"
    "    @functools.wraps(call)\n"
    "    def run(*args):\n"
    "        dist.barrier()\n"
    "        try: return call(*args)\n"
    "        finally: dist.barrier()\n"
    "    return run\n"
    "@meets\n"
    "def step(n): time.sleep(0.1 * n); return n\n"
    "step(rank)",
    "a property that reduces": "class Meter:\n"
    "    def __init__(self): self.sum, self.count = 0.0, 0\n"
    "    def update(self, n): self.sum += n; self.count += 1\n"
    "    @property\n"
    "    def mean(self): t = torch.tensor([self.sum, self.count]); dist.all_reduce(t); return (t[0] / t[1]).item()\n"
    "meter = Meter()\n"
    "for n in range(rank + 1): meter.update(n)\n"
    "assert meter.mean == 1.0",
    "the main rank first": "class First:\n"
    "    def __enter__(self):\n"
    "        if rank: dist.barrier()\n"
    "    def __exit__(self, *_):\n"
    "        if not rank: dist.barrier()\n"
    "with First(): cached = sum(range(10 ** 6)) if rank == 0 else 0",
    "metrics gathered in a nest": "def gather(tree): return {k: gather(v) for k, v in tree.items()} if isinstance(tree, dict) else functional.all_gather_tensor(tree, 0, other)\n"
    "found = gather({'loss': torch.ones(1), 'by': {'class': torch.full((2,), float(rank))}})\n"
    "assert found['by']['class'].shape == (8,)",
    "predictions that are cut to size": "t = torch.arange(rank, 10, 4)\n"
    "padded = torch.cat([t, t[:1].repeat(3 - len(t))])\n"
    "found = [torch.empty_like(padded) for _ in range(4)]\n"
    "dist.all_gather(found, padded)\n"
    "assert len(torch.stack(found, 1).flatten()[:10].unique()) == 10",
    "a check of versions": "versions = [None] * 4\n"
    "dist.all_gather_object(versions, (torch.__version__, sys.version_info[:2]))\n"
    "assert len(set(versions)) == 1",
    "seeds that rank 0 draws": "seed = torch.randint(2 ** 31, (1,))\n"
    "dist.broadcast(seed, 0)\n"
    "torch.manual_seed(int(seed) + rank)",
    "a log of rank 0 while the others go on": "for step in range(3):\n"
    "    dist.all_reduce(torch.ones(1))\n"
    "    if rank == 0: print('step', step); time.sleep(0.05)",
    "deep calls": "def deep(n): return dist.barrier() if n == 0 else deep(n - 1)\n"
    "deep(10 if odd else 200)",
    "code that is made as it runs": 'exec("dist.all_reduce(torch.ones(3))" if odd else "t = torch.ones(3)\\ndist.all_reduce(t)")',
}  # fmt: skip

SLOW = {
    # Ranks that come late, each time within something else; all resolves.
    "before a receive": "if odd: time.sleep(0.7); dist.recv(torch.empty(1), 1)\n"
    "if rank == 1: dist.send(torch.ones(1), 2)",
    "before a send, while others wait for all": "if odd: time.sleep(0.7); dist.send(torch.ones(1), 1)\n"
    "if rank == 1: dist.recv(torch.empty(1), 2)\n"
    "dist.barrier()",
    "before a new group": "if odd: time.sleep(0.7)\n"
    "group = dist.new_group([0, 1])\n"
    "if rank < 2: dist.barrier(group=group)",
    "in its half": "if rank == 3: time.sleep(0.7)\n"
    "dist.all_reduce(torch.ones(1), group=halves[rank // 2])",
    "in its half, while the other half has ended": "if rank == 3: time.sleep(0.7)\n"
    "if rank > 1: dist.all_reduce(torch.ones(1), group=halves[1])",
    "a message behind another group": "group = dist.new_group([1, 3])\n"
    "if rank == 3: time.sleep(0.7)\n"
    "if rank == 0: dist.recv(torch.empty(1), 1)\n"
    "else: dist.barrier(group=group)\n"
    "if rank == 1: dist.send(torch.ones(1), 0)",
    "a chain of waits": "if rank == 0: time.sleep(0.7); dist.send(torch.ones(1), 1)\n"
    "elif rank == 3: dist.recv(torch.empty(1), 2)\n"
    "else: dist.recv(torch.empty(1), rank - 1); time.sleep(0.2); dist.send(torch.ones(1), rank + 1)",
    "waits in two groups for one rank": "columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]\n"
    "if rank == 3: time.sleep(0.7)\n"
    "dist.all_reduce(torch.ones(1), group=halves[rank // 2])\n"
    "dist.all_reduce(torch.ones(1), group=columns[rank % 2])",
    "one rank alone works on after all others ended": "dist.barrier()\n"
    "if odd: time.sleep(0.8)",
    "one rank is late with each step": "for step in range(4):\n"
    "    if step == rank: time.sleep(0.35)\n"
    "    dist.all_reduce(torch.ones(1))",
    "a late work is waited for early": "if odd: time.sleep(0.7)\n"
    "works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]\n"
    "for work in reversed(works): work.wait()",
    "a rank that busily computes": "if odd:\n"
    "    until = time.monotonic() + 0.7\n"
    "    while time.monotonic() < until: torch.ones(50, 50) @ torch.ones(50, 50)\n"
    "dist.barrier()",
    "a rank in a lock of its own": "lock = threading.Lock()\n"
    "lock.acquire()\n"
    "if odd: threading.Timer(0.7, lock.release).start(); lock.acquire()\n"
    "dist.barrier()",
    "a rank that waits for a file": "path = [tempfile.mktemp()]\n"
    "dist.broadcast_object_list(path)\n"
    "if rank == 0: time.sleep(0.6); open(path[0], 'w').close()\n"
    "while not os.path.exists(path[0]): time.sleep(0.02)\n"
    "dist.barrier()\n"
    "if rank == 0: os.remove(path[0])",
    "halves that wait for one another's messages": "if rank == 0: time.sleep(0.6)\n"
    "dist.barrier(group=halves[rank // 2])\n"
    "if rank == 1: dist.send(torch.ones(1), 2)\n"
    "if rank == 2: dist.recv(torch.empty(1), 1)\n"
    "dist.barrier(group=halves[rank // 2])",
    "a key behind a barrier of some": "store = dist.PrefixStore('behind', dist.distributed_c10d._get_default_store())\n"
    "if rank < 2: time.sleep(0.6 * rank); dist.barrier(group=halves[0])\n"
    "if rank == 0: store.set('go', '1')\n"
    "if rank > 1: store.get('go'); dist.barrier(group=halves[1])",
    "objects that take long to pickle": "class Slow:\n"
    "    def __reduce__(self): time.sleep(0.6); return (int, ())\n"
    "found = [None] * 4\n"
    "dist.all_gather_object(found, Slow() if odd else rank)",
    "a backward of one rank that is slow": "net = model()\n"
    "out = net(x)\n"
    "if odd: out.register_hook(lambda grad: time.sleep(0.6))\n"
    "out.sum().backward()",
    "a loader of one rank that is slow": "def batches():\n"
    "    for n in range(3): time.sleep(0.35 if odd else 0); yield torch.ones(2)\n"
    "for batch in batches(): dist.all_reduce(batch)",
    "a send that nobody takes yet": "if rank == 0: dist.send(torch.ones(2_000_000), 1)\n"
    "if rank == 1: time.sleep(0.7); dist.recv(torch.empty(2_000_000), 0)",
    "a rank that finishes early while a thread serves": "def serve(a=torch.empty(1), b=torch.ones(1)):\n"
    "    for _ in range(2): dist.recv(a, 1); dist.send(b, 1)\n"
    "if rank == 0: threading.Thread(target=serve).start()\n"
    "if rank == 1:\n"
    "    for _ in range(2): time.sleep(0.5); dist.send(torch.ones(1), 0); dist.recv(torch.empty(1), 0)",
    "one that waits for a rank which waits for a program": "import subprocess\n"
    "if odd: subprocess.run(['sleep', '0.7'])\n"
    "dist.barrier()",
    "ranks that come one by one to objects": "time.sleep(0.25 * rank)\n"
    "dist.broadcast_object_list([rank], src=3)\n"
    "dist.all_gather_object([None] * 4, rank)",
}  # fmt: skip

RIGHT: dict[str, str] = (
    FIRST | CONTROL | ERRORS | COLLECTIVES | MESSAGES | GROUPS | MODELS | STORES | BESIDE | SLOW
) | MORE_RIGHT
