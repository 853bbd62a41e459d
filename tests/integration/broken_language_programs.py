"""Broken programs whose mistake is one of Python's, after public bug reports.

Control flow, threads, coroutines, processes, signals and errors that are swallowed; see
:mod:`tests.integration.broken_programs`. The file is long because it is a list of programs.
"""

from __future__ import annotations

from tests.integration.broken_program import Program, stops, swallows

__all__ = ["LANGUAGE_PROGRAMS"]

BUT_0 = "ranks 1-3"

FLOW = {
    "a name that only rank 0 has": Program(
        "if rank == 0: chosen = {'lr': 0.1}\n"
        "rate = torch.tensor(chosen['lr'])\n"
        "dist.all_reduce(rate)",
        what="NameError.*chosen", line=2, who=BUT_0,
    ),
    "a result that is remembered": Program(
        "@functools.lru_cache\n"
        "def total(n):\n"
        "    t = torch.tensor(float(n)); dist.all_reduce(t)\n"
        "    return t.item()\n"
        "total(1)\n"
        "total(1 if odd else 2)",
        line=3,
    ),
    "a property that is computed once, by rank 0": Program(
        "class Vocabulary:\n"
        "    @functools.cached_property\n"
        "    def size(self):\n"
        "        t = torch.tensor(7); dist.all_reduce(t, op=dist.ReduceOp.MAX)\n"
        "        return t.item()\n"
        "vocabulary = Vocabulary()\n"
        "if rank == 0: print(vocabulary.size)",
        line=4, who=BUT_0,
    ),
    "a limit of time that each rank has for itself": Program(
        "end = time.monotonic() + (0.1 if odd else 1.0)\n"
        "while time.monotonic() < end:\n"
        "    dist.all_reduce(torch.ones(1)); time.sleep(0.02)",
        line=3,
    ),
    "a loop until the loss is small": Program(
        "loss = 1.0 if odd else 4.0\n"
        "while (loss := loss / 2) > 0.1: dist.all_reduce(torch.tensor(loss))",
        line=2,
    ),
    "another case for one rank": Program(
        "match 'save' if odd else 'train':\n"
        "    case 'save': dist.gather_object(1, [None] * 4 if rank == 0 else None)\n"
        "    case 'train': dist.all_reduce(some)",
        what="gather|all_reduce", line=(2, 3),
    ),
    "data of two lengths, side by side": Program(
        "inputs, labels = range(3), range(2 if odd else 3)\n"
        "for pair in zip(inputs, labels, strict=True): dist.all_reduce(torch.ones(1))",
        what="ValueError.*zip", line=2,
    ),
    "a rank that is compared as text": Program(
        "if os.environ['RANK'] == '3': dist.barrier()", what="barrier", who="ranks 0-2"
    ),
    "a level of logging that only rank 0 has": Program(
        "import logging\n"
        "class Handler(logging.Handler):\n"
        "    def emit(self, record): dist.reduce(torch.ones(1), 0)\n"
        "log = logging.Logger('run', logging.INFO if rank == 0 else logging.WARNING)\n"
        "log.addHandler(Handler())\n"
        "log.info('step')",
        what="reduce", line=(3, 6), who=BUT_0,
    ),
    "a finalizer that meets the others": Program(
        "import weakref\n"
        "class Handle: pass\n"
        "handle = Handle()\n"
        "finalizer = weakref.finalize(handle, dist.barrier)\n"
        "if odd: del handle\n"
        "dist.all_reduce(some)",
        what="barrier", line=(5, 6),
    ),
    "a return in a finally": Program(
        "def step():\n"
        "    try:\n"
        "        if odd: raise ValueError('bad sample')\n"
        "        dist.barrier()\n"
        "    finally: return None\n"
        "step()\n"
        "dist.all_reduce(some)",
        what="barrier|all_reduce|ValueError", line=(3, 4, 7),
    ),
    "an error that a decorator turns into a default": Program(
        "def default(function):\n"
        "    def run():\n"
        "        try: return function()\n"
        "        except Exception: return 0.0\n"
        "    return run\n"
        "@default\n"
        "def score():\n"
        "    if odd: raise ZeroDivisionError\n"
        "    dist.all_reduce(torch.ones(1)); return 1.0\n"
        "score()\n"
        "dist.broadcast(some, 0)",
        what="all_reduce|broadcast|ZeroDivisionError", line=(8, 9, 11),
    ),
    "a stop of an iterator in a generator": Program(
        "def batches(source):\n"
        "    while True: yield next(source)\n"
        "for batch in batches(iter(range(2 if odd else 3))): dist.all_reduce(torch.ones(1))",
        what="RuntimeError.*StopIteration", line=(2, 3),
    ),
    "a context that does not yield": Program(
        "@contextlib.contextmanager\n"
        "def timer():\n"
        "    if not odd: yield\n"
        "with timer(): dist.all_reduce(some)",
        what="RuntimeError.*yield", line=4,
    ),
    "code that is made as it runs": Program(
        "exec('if not odd: dist.barrier()')", what="barrier"
    ),
    "a module that was written beside the notebook": Program(
        "folder = tempfile.mkdtemp()\n"
        "text = 'import torch.distributed as dist\\n\\ndef step(t):\\n    dist.all_reduce(t)\\n'\n"
        "_ = open(os.path.join(folder, 'stepping.py'), 'w').write(text)\n"
        "sys.path.insert(0, folder); sys.modules.pop('stepping', None)\n"
        "import stepping; sys.path.remove(folder)\n"
        "if not odd: stepping.step(some)",
        line=4,  # of that file
    ),
    "a module with a mistake": Program(
        "folder = tempfile.mkdtemp()\n"
        "text = 'rate = 1 / 0' if odd else 'rate = 1'\n"
        "_ = open(os.path.join(folder, 'mistaken.py'), 'w').write(text)\n"
        "sys.path.insert(0, folder); sys.modules.pop('mistaken', None)\n"
        "import mistaken\n"
        "dist.barrier()",
        what="ZeroDivisionError", line=(1, 5),
    ),
    "a module that one rank has not": Program(
        "if odd: import flash_attention_of_the_future\ndist.barrier()",
        what="ModuleNotFoundError.*flash_attention", line=1,
    ),
    "a comparison of tensors as a truth": Program(
        "if torch.ones(2 if odd else 1) > 0: dist.barrier()", what="RuntimeError.*[Bb]oolean"
    ),
    "a text that is not a number": Program(
        "steps = int('12k' if odd else '12')\nfor _ in range(steps): dist.all_reduce(some)",
        what="ValueError.*12k", line=1,
    ),
    "a variable that is used before it is set": Program(
        "def train():\n"
        "    for batch in range(0 if odd else 2): loss = torch.ones(1)\n"
        "    dist.all_reduce(loss)\n"
        "train()",
        what="UnboundLocalError", line=(3, 4),
    ),
    "an argument that one class does not take": Program(
        "def build(kind, **options): return {'a': dict, 'b': int}[kind](**options)\n"
        "build('b' if odd else 'a', hidden=4)\n"
        "dist.barrier()",
        what="TypeError", line=(1, 2),
    ),
    "a warning that is an error": Program(
        "import warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('error')\n"
        "    if odd: warnings.warn('this is deprecated')\n"
        "    dist.all_reduce(some)",
        what="UserWarning.*deprecated", line=4,
    ),
}  # fmt: skip

ERRORS = {
    "an error that wants two arguments": Program(
        "class ShardError(Exception):\n"
        "    def __init__(self, shard, reason): super().__init__(f'shard {shard}: {reason}')\n"
        "if odd: raise ShardError(3, 'truncated')\n"
        "dist.barrier()",
        what="ShardError.*shard 3: truncated", line=3,
    ),
    "an error that begins with empty lines": Program(
        "if odd: raise RuntimeError('\\n\\n  the tokenizer is missing\\n')\ndist.barrier()",
        what="RuntimeError.*the tokenizer is missing",
    ),
    "an error without a text": Program(
        "if odd: raise NotImplementedError\ndist.barrier()", what="NotImplementedError"
    ),
    "an error from another": Program(
        "try: {}['pixels']\n"
        "except KeyError as error:\n"
        "    if odd: raise RuntimeError('step 3 failed') from error\n"
        "dist.barrier()",
        what="RuntimeError.*step 3 failed|KeyError.*pixels", line=(1, 3),
    ),
    "an error while another is handled": Program(
        "try:\n"
        "    if odd: raise OSError('disk full')\n"
        "    dist.all_reduce(some)\n"
        "except OSError: undefined_cleanup()",
        what="NameError|OSError.*disk full", line=(2, 4),
    ),
    "a group of errors": Program(
        "if odd: raise ExceptionGroup('two shards', [OSError('a.bin'), OSError('b.bin')])\n"
        "dist.barrier()",
        what="ExceptionGroup|OSError.*a.bin",
    ),
    "an interrupt of the program's own": Program(
        "if odd: raise KeyboardInterrupt\ndist.barrier()", what="KeyboardInterrupt"
    ),
    "an exit in a helper": Program(
        "def check(ok):\n    if not ok: exit(2)\ncheck(not odd)\ndist.barrier()",
        what="UsageError.*exit", line=(2, 3),
    ),
    "an error with a note": Program(
        "try:\n"
        "    if odd: raise ValueError('bad row')\n"
        "    dist.barrier()\n"
        "except ValueError as error:\n"
        "    error.add_note('in part-0007.parquet')\n"
        "    raise",
        what="ValueError.*bad row", line=2,
    ),
    "a type that is no error": Program(
        "if odd: raise 'the loss is nan'\ndist.barrier()", what="TypeError.*BaseException"
    ),
    "an assertion of two values": Program(
        "assert rank != 2, ('rank', rank)\ndist.barrier()", what="AssertionError"
    ),
    "an error of each rank, of which one is the reason": Program(
        "if odd: raise FileNotFoundError('shard-2.bin')\n"
        "try: dist.all_reduce(some)\n"
        "except Exception as error: raise SystemError('training failed') from error",
        what="FileNotFoundError.*shard-2.bin", line=1,
    ),
    "different errors of all ranks": Program(
        "[lambda: {}['a'], lambda: [][0], lambda: 1 / 0, lambda: int('x')][rank]()",
        what="(Key|Index|ZeroDivision|Value)Error", who="rank 0|ranks 0",
    ),
}  # fmt: skip

BESIDE = {
    "an error in a thread that all need": Program(
        "def work(t=torch.ones(4)):\n"
        "    if odd: raise ValueError('bad shard')\n"
        "    dist.all_reduce(t)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start(); thread.join()",
        what="all_reduce|ValueError", line=(2, 3),
    ),
    "a future with a limit": Program(
        "def reduce(t=torch.ones(4)): dist.all_reduce(t)\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    if not odd: pool.submit(reduce).result(timeout=20)",
        line=(1, 3),
    ),
    "a pool that maps over other numbers": Program(
        "def reduce(n): dist.all_reduce(torch.ones(n + 1, device=device))\n"
        "with ThreadPoolExecutor(1) as pool: list(pool.map(reduce, range(2 if odd else 3)))",
        line=(1, 2),
    ),
    "a coroutine that nobody awaits": Program(
        "async def reduce(): dist.all_reduce(some)\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "reduce() if odd else await reduce()",
        line=(1, 3),
    ),
    "a limit of asyncio over an operation": Program(
        "def reduce(t=torch.ones(4)): dist.all_reduce(t)\n"
        "if not odd:\n"
        "    async with asyncio.timeout(20): await asyncio.to_thread(reduce)",
        line=(1, 3),
    ),
    "a task that fails while others wait for it": Program(
        "async def load():\n"
        "    await asyncio.sleep(0.01)\n"
        "    if odd: raise LookupError('no such sample')\n"
        "await asyncio.gather(load(), asyncio.sleep(0.02))\n"
        "dist.barrier()",
        what="LookupError", line=(3, 4),
    ),
    "a task that is cancelled": Program(
        "async def load(): await asyncio.sleep(30)\n"
        "task = asyncio.create_task(load())\n"
        "await asyncio.sleep(0)\n"
        "task.cancel()\n"
        "if odd: await task\n"
        "dist.barrier()",
        what="CancelledError", line=(1, 5),
    ),
    "a loop within a loop": Program(
        "async def reduce(): dist.all_reduce(some)\n"
        "if odd: asyncio.run(reduce())\n"
        "else: await reduce()",
        what="RuntimeError.*asyncio.run|all_reduce", line=(1, 2, 3),
    ),
    "an alarm that raises": Program(
        "def ring(*_): raise TimeoutError('the step took too long')\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "if odd: signal.setitimer(signal.ITIMER_REAL, 0.2); time.sleep(20)\n"
        "dist.barrier()",
        what="TimeoutError.*too long", line=(1, 3),
    ),
    "an alarm that raises in those who wait": Program(
        "def ring(*_): raise TimeoutError('the step took too long')\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "if not odd: signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "if odd: time.sleep(1.5)\n"
        "dist.barrier()",
        what="TimeoutError.*too long", line=(1, 5), who="ranks 0-1,3",
    ),
    "an alarm in those who wait, who catch it and go on": Program(
        "def ring(*_): raise TimeoutError('the step took too long')\n"
        "signal.signal(signal.SIGALRM, ring)\n"
        "if not odd: signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "if odd: time.sleep(1.5)\n"
        "try: dist.barrier()\n"
        "except TimeoutError: pass\n"
        "dist.all_reduce(some)",
        what="barrier", line=(5, 7), who="ranks? (0-1,3|2)",
    ),
    "a program with a limit": Program(
        "import subprocess\n"
        "if odd: subprocess.run(['sleep', '20'], timeout=0.3)\n"
        "dist.barrier()",
        what="TimeoutExpired", line=2,
    ),
    "a program that is not installed": Program(
        "import subprocess\n"
        "subprocess.check_output(['no-such-converter' if odd else 'true'])\n"
        "dist.barrier()",
        what="FileNotFoundError.*no-such-converter", line=2,
    ),
    "a pool of processes that maps": Program(
        "import multiprocessing\n"
        "def parse(row): return int(row)\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    rows = pool.map(parse, ['1', 'x' if odd else '2'])\n"
        "dist.barrier()",
        what="ValueError.*'x'", line=(2, 4),
    ),
    "a child that has failed": Program(
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=sys.exit, args=(int(odd),))\n"
        "child.start(); child.join()\n"
        "assert child.exitcode == 0, f'the converter ended with {child.exitcode}'\n"
        "dist.barrier()",
        what="AssertionError.*ended with 1", line=4,
    ),
    "a process that is killed for its memory": Program(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def convert(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "with ProcessPoolExecutor(1, multiprocessing.get_context('fork')) as pool:\n"
        "    if odd: pool.submit(convert).result()\n"
        "dist.barrier()",
        what="BrokenProcessPool", line=5,
    ),
    "an object that a process cannot take": Program(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "with ProcessPoolExecutor(1, multiprocessing.get_context('fork')) as pool:\n"
        "    if odd: pool.submit(lambda: 1).result()\n"
        "dist.barrier()",
        what="Pickl|AttributeError", line=4,
    ),
    "a server that refuses": Program(
        "import urllib.request\n"
        "if odd: urllib.request.urlopen('http://127.0.0.1:9/data')\n"
        "dist.barrier()",
        what="URLError", line=2,
    ),
}  # fmt: skip

WAITS = {
    "a barrier of threads": stops(
        "if odd: threading.Barrier(2).wait()", 1, "threading.Barrier"
    ),
    "a pipe into which nobody writes": stops("if odd: os.read(os.pipe()[0], 1)", 1, "os.read"),
    "a signal that never comes": stops(
        "if odd: signal.pause()", 1, "signal.pause"
    ),
    "a lock of a file, and a barrier": stops(
        "import fcntl\n"
        "path = [tempfile.mkstemp()[1]]\n"
        "dist.broadcast_object_list(path, 0)\n"
        "file = open(path[0])\n"
        "if rank == 0: fcntl.flock(file, fcntl.LOCK_EX); dist.barrier()\n"
        "else: time.sleep(0.3); fcntl.flock(file, fcntl.LOCK_EX); dist.barrier()",
        (5, 6), "flock|barrier", "ranks? (0|1-3)",
    ),
    "an attempt that is made again and again": stops(
        "def fetch(): raise ConnectionError('refused')\n"
        "while odd:\n"
        "    try: fetch(); break\n"
        "    except ConnectionError: time.sleep(0.1)",
        (1, 2, 3, 4), "sleep|fetch|while",
    ),
    "an event of asyncio, while others wait": stops(
        "if odd: await asyncio.Event().wait()\ndist.barrier()", (1, 2), "barrier.*rank 2|await"
    ),
    "a lock of asyncio that is held": stops(
        "lock = asyncio.Lock()\nawait lock.acquire()\nif odd: await lock.acquire()", 3, "lock"
    ),
    "a loop in a cell that awaits later": stops(
        "while odd: time.sleep(0.05)\nawait asyncio.sleep(0)", 1, "sleep|while"
    ),
    "a queue of asyncio": stops("if odd: await asyncio.Queue().get()", 1, "Queue|await"),
    "a pool whose work does not end": stops(
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    if odd: pool.apply(time.sleep, (30,))",
        3, "pool.apply",
    ),
    "a server that never answers": stops(
        "import socket, urllib.request\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "if odd: urllib.request.urlopen('http://127.0.0.1:%d' % server.getsockname()[1])",
        3, "urlopen",
    ),
    "two locks in two orders": stops(
        "a, b, met = threading.Lock(), threading.Lock(), threading.Barrier(2)\n"
        "def other_way():\n"
        "    with b: met.wait(); a.acquire(timeout=30)\n"
        "if odd:\n"
        "    threading.Thread(target=other_way, daemon=True).start()\n"
        "    with a: met.wait(); b.acquire()",
        6, "b.acquire",
    ),
    "a generator that searches for ever": stops(
        "import itertools\n"
        "if odd: next(n for n in itertools.count() if n < 0)", 2, "next|count"
    ),
    "a tree with a circle": stops(
        "parents = {'a': 'b', 'b': 'a'}\n"
        "def root(node):\n"
        "    while node in parents: node = parents[node]\n"
        "    return node\n"
        "dist.broadcast_object_list([root('a' if odd else 'c')], 2)",
        (3, 5), "broadcast.*rank 2|while",
    ),
}  # fmt: skip

SWALLOWED = {
    "a mismatch that is logged": swallows(
        "import logging\n"
        "try: dist.all_reduce(torch.ones(4 + odd))\n"
        "except Exception: logging.getLogger('quiet').debug('failed', exc_info=True)",
        2,
    ),
    "a mismatch that is tried again": swallows(
        "for attempt in range(3):\n"
        "    try: dist.all_reduce(torch.ones(4 + odd)); break\n"
        "    except RuntimeError: continue",
        2,
    ),
    "a mismatch within a return in a finally": swallows(
        "def step():\n"
        "    try: dist.all_reduce(torch.ones(4 + odd))\n"
        "    finally: return 0\n"
        "step()",
        2,
    ),
    "a hang in a context that swallows": swallows(
        "class Quiet:\n"
        "    def __enter__(self): pass\n"
        "    def __exit__(self, *_): return True\n"
        "with Quiet():\n"
        "    if odd: raise ValueError('bad sample')\n"
        "    dist.all_reduce(some)",
        6,
    ),
    "a mismatch in a finalizer": swallows(
        "import weakref\n"
        "class Handle: pass\n"
        "handle = Handle()\n"
        "weakref.finalize(handle, lambda: dist.all_reduce(torch.ones(4 + odd)))\n"
        "del handle",
        (4, 5),
    ),
    "a mismatch in a callback of a weak reference": swallows(
        "import weakref\n"
        "class Handle: pass\n"
        "handle = Handle()\n"
        "link = weakref.ref(handle, lambda _: dist.all_reduce(torch.ones(4 + odd)))\n"
        "del handle",
        (4, 5),
    ),
    "a hang in a generator that is dropped": swallows(
        "def steps():\n"
        "    try: yield 1\n"
        "    finally:\n"
        "        if not odd: dist.all_reduce(some)\n"
        "steps_ = steps(); next(steps_)\n"
        "del steps_",
        4,
    ),
    "a mismatch while a line is logged": swallows(
        "import logging\n"
        "class Handler(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        try: dist.all_reduce(torch.ones(4 + odd))\n"
        "        except Exception: self.handleError(record)\n"
        "log = logging.Logger('run'); log.addHandler(Handler())\n"
        "log.info('step')",
        4,
    ),
    "a hang in a thread of which nobody hears": swallows(
        "def step(t=torch.ones(4)):\n"
        "    try:\n"
        "        if not odd: dist.all_reduce(t)\n"
        "    except Exception: pass\n"
        "thread = threading.Thread(target=step); thread.start(); thread.join()",
        3,
    ),
    "a mismatch of a task at which nobody looks": swallows(
        "async def step(): dist.all_reduce(torch.ones(4 + odd))\n"
        "task = asyncio.create_task(step())\n"
        "await asyncio.sleep(0.1)",
        1,
    ),
    "an asynchronous mismatch that is caught": swallows(
        "try:\n"
        "    work = dist.all_reduce(torch.ones(4 + odd), async_op=True)\n"
        "    work.wait()\n"
        "except RuntimeError: work = None",
        (2, 3),
    ),
    "a message of another length that is caught": swallows(
        "try:\n"
        "    if odd: dist.send(torch.ones(3), 3)\n"
        "    if rank == 3: dist.recv(torch.ones(2), 2)\n"
        "except RuntimeError: pass",
        (2, 3), "send|recv",
    ),
    "a forked child that waits for the others": swallows(
        "if odd:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        try: dist.barrier()\n"
        "        except Exception: pass\n"
        "        finally: os._exit(0)\n"
        "    os.waitpid(child, 0)",
        4, "barrier",
    ),
}  # fmt: skip

LANGUAGE_PROGRAMS: dict[str, Program] = FLOW | ERRORS | BESIDE | WAITS | SWALLOWED
