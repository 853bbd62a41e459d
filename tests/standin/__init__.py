"""A stand-in for NCCL and its device, for machines without a GPU.

``preload=["tests.standin.register"]`` of a session, or importing that module, gives torch a
device ``standin`` and a backend of the same name. What ranks do on them takes the course that it
takes on GPUs: operations are put on streams and run later, a collective waits on the stream and not
in the call, a rank blocks in C where it needs a result, a missing peer is waited for until
``abort()``, and an aborted communicator is of no use any more. The device's memory is the host's,
its streams are threads, and the ranks' data pass through shared memory. It needs torch 2.13, g++
and Python's headers. ``python -m tests.standin`` builds it, in ``build/`` of the checkout.

These variables are read when they are needed: ``DISTSESSION_STANDIN_DEVICES`` (8),
``DISTSESSION_STANDIN_MEMORY`` (16 GiB; bytes of a device), ``DISTSESSION_STANDIN_ONE_STREAM`` (off)
and ``DISTSESSION_STANDIN_REMOTE_ERROR_S`` (never).

What it was written after: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`` ("PG" below) and
``NCCLUtils.cpp`` ("utils"), ``c10/cuda/CUDACachingAllocator.cpp`` and ``CUDAStream.cpp`` of
PyTorch, and ``src/`` of NCCL. ``tests/gpu`` was run on both: what differed was corrected.

=====================================================  =========================================
What NCCL and CUDA do, and where that is to be read    What the stand-in does
=====================================================  =========================================
A communicator is made by the first operation, and     ``Communicator::join``: the same, polling
the call blocks until all ranks are there (PG          the group's store, without the
``initNCCLComm``, NCCL ``init.cc``                     interpreter's lock.
``ncclCommInitRankFunc``).
It connects its ranks at the first operation of each   ``Communicator::connect``: for each kind
algorithm, and that call blocks until they come, too   of operation. A batch connects nothing.
(NCCL ``group.cc`` ``ncclCollPreconnect``).
The id of a communicator goes through the group's      The path of a ``memfd`` of rank 0 does.
store (PG ``broadcastUniqueNCCLID``).
A send or recv that is no batch has a communicator     The same, with keys ``low:high``.
of two ranks, unless the group was bound to a device
at its init (PG ``pointToPoint``, ``eagerInit_``).
With ``asyncOp`` an operation runs on a stream of the  ``launch``: the same, on a stream of the
group's own, after what the current stream has by      pool. ``DISTSESSION_STANDIN_ONE_STREAM=1``
then, and its tensors are kept until ``wait()`` (PG    gives all groups of a device one stream.
``collective``, ``syncStream``).                       Tensors are kept as record_stream does.
Without, it runs on the current stream and there is    The same: None in Python. A barrier waits
no work; a barrier waits in the call (PG               in the call.
``collective``: ``asyncOp ? work : nullptr``).
Operations of one communicator run in the order of     Each waits for the one before on its
their launch, on whatever streams (NCCL                communicator.
``enqueue.cc``).
Both ranks' operations have to come in one order,      The same: bytes of a communicator are a
and with equal sizes; else rubbish or a hang.          stream between each two ranks. Nothing is
                                                       written beyond a tensor's end.
``wait()`` lets the current stream wait and returns;   ``Work::wait``: the same. What an abort
with a time-out of its own the host waits, aborts      has cut off raises at once; there the
and raises; a barrier's lets the host wait. It raises  watchdog or ``isCompleted()`` has to have
an error that was seen (PG ``WorkNCCL::wait``).        seen it.
``isCompleted()`` asks the end event, and is true      ``Work::isCompleted``: the same.
after an error (PG ``WorkNCCL::isCompleted``).
The future is completed at launch and has the          The same.
stream's event (PG ``collective``).
Between startCoalescing and endCoalescing all is one   ``Operation.pieces``: one exchange of all
group of NCCL, which makes progress together (PG       transfers, and one work at the end.
``endCoalescing``, NCCL ``group.cc``).
abort() sets a flag that kernels look at; the stream   ``Communicator::abort``: the same. Works
then goes on (NCCL ``init.cc``                         that were cut off have an error.
``ncclCommAbort``, ``device/prims_simple.h``
``checkAbort``).
Aborted communicators stay in the cache, so every      The same message, also if no
later use raises "NCCL communicator was aborted on     communicator had been made.
rank N." (PG ``abortCommsFromMap``, utils
``NCCLComm::getNcclComm``). All are aborted in one
group of NCCL, in a thread that is waited for (PG
``abort``).
An abort frees memory, for which CUDA waits until all  ``Communicator::abort`` waits for all
kernels have ended, those of other communicators, too  operations of the process.
(``cudaFree``; seen on a GPU).
shutdown() waits for all kernels before it destroys    The same.
(PG ``shutdown``, NCCL ``ncclCommFinalize``).
A peer of one host that dies is not noticed; over a    Never noticed, or after
network a proxy thread reports ncclRemoteError. The    ``DISTSESSION_STANDIN_REMOTE_ERROR_S``. The
error frees no kernel, only an abort does (NCCL        error is on the work; the stream stands.
``proxy.cc``, PG ``checkForNCCLErrors``).
The watchdog marks a work that takes longer than its   ``see_time_limit``: whoever asks the work
limit as failed, so that ``isCompleted()`` is true     does so. Nothing is aborted or ended, as
while the kernel goes on waiting; it may abort, and    with TORCH_NCCL_ASYNC_ERROR_HANDLING=0.
end the process (PG ``Watchdog::runLoop``).
A little is sent though nobody receives it yet: the    128 KiB between each two ranks.
buffers of a channel hold it.
avg of integers truncates; a bool's sum is an or;      The same.
BAND, BOR and BXOR raise (PG ``getNcclReduceOp``).
An operation on the device is enqueued; a copy to      The same, where shapes can be told
pageable memory, ``item()`` and ``synchronize()``      without data (by the operation's kernel
block without the interpreter's lock.                  for the device ``meta``).
Pageable memory up to 64 KiB is staged on the way to   The same.
the device; more blocks (CUDA's "API synchronization
behavior").
A stream may reuse memory at once that was let go of,  ``Cache``: the same, without splitting.
others only after record_stream (CUDACachingAllocator
``free``).
An error in a kernel is sticky: all later calls raise  ``break_device``: the same, per device;
it (CUDA ``cudaErrorIllegalAddress``).                 ``torch.standin._break`` brings it about.
A context does not survive a fork.                     Nor do streams, once one was used.
``set_device`` initialises CUDA (``torch/csrc/cuda/    ``is_initialized()`` is true from then on.
Module.cpp``), so a mesh leaves the device as it is.
A split waits until all ranks of the parent have       ``Communicator::split``: the same.
called, the members of the new group and the others
(NCCL ``init.cc`` ``ncclCommSplit``; utils
``NCCLComm::split``).
=====================================================  =========================================

That is ``standin``, after the class ``ProcessGroupNCCL``. From torch 2.15 on ``"nccl"`` is
``ProcessGroupNCCL2``, and ``"nccl-lazy"`` ``ProcessGroupNCCLLazy``. The backends ``standin2`` and
``standin-lazy`` play them, on any torch that the stand-in runs with. What differs was read in
``nccl2/ProcessGroupNCCL.cpp`` ("PG2" below), ``ProcessGroupNCCLBackend.cpp`` ("backend"),
``ProcessGroupNCCLUtils.cpp`` ("utils2"), ``WorkNCCL.cpp`` ("work"), ``lazy/LazyBackend.hpp``
("lazy") and ``distributed_c10d.py``. ``tests.standin.class_checks`` has programs that show it.

=====================================================  =========================================
What the classes of torch 2.15 do                      What the stand-in does
=====================================================  =========================================
The communicator is made with the group, on the        ``connect_on``: the same.
device that the group is bound to, or else on that of
LOCAL_RANK, to which it binds the group
(``distributed_c10d.py`` ``_nccl2_device``, PG2
``init``). Tensors of other devices are refused        ``check_device``: the same message.
(utils2 ``checkTensorDevice``).
A split waits for all ranks of the parent (PG2         The same. What a lazy group is split into
``split``). A lazy group splits its own communicator   is a ``ProcessGroupStandin2``.
(lazy ``split``).
Each operation has a work, also one that is not        ``returned``: the same. A barrier's work
asynchronous; a barrier's waits on the host (backend,  waits for the current stream.
work ``synchronizeInternal``).
Whether a work is over is asked of the group's health  ``Ledger::look``: the same order, and the
first, then of the end event, then of its time limit   same messages.
(work ``checkStatus``). A ``wait()`` that finds it
failed raises, and aborts nothing.
Each second, and with each operation, all works are    ``watch``, ``check_usable``: the same.
asked, and the group's health follows; later
operations raise (utils2 ``timeoutWatchdog``,
``checkAndAbortIfTimedOutOrError``).
What follows is TORCH_NCCL_ASYNC_ERROR_HANDLING's: 0   ``handle_failure``: the same, at once; on
nothing, 1 abort and end the process, 2 abort, 3 (the  a GPU the process ends 15 s later, for
default) end it (PG2 ``handleWatchdogFailure``).       the flight recorder is written first.
abort() stops the watchdog, and then marks the group   ``abort``: the same.
(PG2 ``abort``). The lazy class does that with its     The same. Each abort waits for all that
own communicator, and then with those of pairs, one    the process has on the device, so the
after the other (lazy ``abort``).                      first one waits for pairs, too.
shutdown() waits for works until their time limits,    The same.
and aborts then (PG2 ``finalize``).
The destructor aborts, unless shutdown() has come      The same. That of ``standin`` does nothing
before (PG2 ``~ProcessGroupNCCL``).                    (utils ``~NCCLComm``).
Between startCoalescing and endCoalescing sends and    The same.
receives are put together, and their works say that
they are over; collectives begin at once (backend
``startCoalescing``, ``endCoalescing``).
Sends and receives that are no batch are on the        The same.
group's communicator and stream; with the lazy class
two ranks have a communicator and a stream of their
own, made by their first message (lazy
``channelFor``).
=====================================================  =========================================

What is false, for whoever has a GPU and can compare:

1. What cannot be told from shapes alone (indexing by a mask, ``unique``, ``equal``), what takes
   host tensors that are no scalars, and what has no kernel for ``meta`` waits for the current
   stream in the call, and then computes on the host. On a GPU some of these are enqueued.
2. A collective is a stream's thread that polls, so any number of them run at once. On a GPU kernels
   take their place on it: two communicators on two streams can deadlock there and not here.
3. All ranks send to all. NCCL's rings and trees pass data on, so with more than two ranks a rank
   that does not come may hold up others of them, and earlier.
4. abort() comes back when the stream's thread has let go. ncclCommAbort frees memory, joins
   proxies, and can itself block, for instance where another thread makes a communicator.
5. Pinned memory is plain, a high priority is none, graphs cannot be captured, and tensors cannot go
   to other processes.
6. destroy_process_group() waits for what hangs, as the source of PG's shutdown says. Before torch
   2.7 or so it aborted.
7. An operation runs with the CPU's kernels: the last bits of sums and the random numbers are
   others, and any error of such a kernel breaks the device, as an assertion does there.
8. An event of one rank's stream is seen by others after tens of microseconds, up to a millisecond
   after a long wait, for the threads poll.
"""

from __future__ import annotations

import os


def required_or_reason() -> str | None:
    """Why tests with the stand-in are skipped here, or None.

    With ``DISTSESSION_STANDIN=required`` a compiler that is missing fails the tests. A torch that
    is too old is always a reason, for other versions are tried, too.
    """
    from tests.standin.build import too_old, why_not

    if os.environ.get("DISTSESSION_STANDIN") == "required":
        return too_old()
    return why_not()
