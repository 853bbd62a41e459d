"""A gloo backend that is made directly, beside the session's group: after test_c10d_gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.torch_suites.cases.case import Case

__all__ = ["Backend"]

RUNS = 100


def _total(count: int) -> float:
    return count * (count + 1) / 2


class Backend(Case):
    """Its operations, what it refuses, and its futures."""

    def _refuses(self, text: str, call: str, tensors: object, **options: object) -> None:
        made = getattr(dist.distributed_c10d, f"{call.capitalize()}Options")()
        for name, value in options.items():
            setattr(made, name, value)
        with self.assertRaisesRegex((RuntimeError, ValueError), text):
            getattr(self.group, call)(*tensors, made)  # type: ignore[misc]

    def test_what_broadcast_refuses(self) -> None:
        self.group = self.gloo()
        one, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
        self._refuses("invalid root rank", "broadcast", ([one],), rootRank=-1, rootTensor=0)
        self._refuses("invalid root rank", "broadcast", ([one],), rootRank=9, rootTensor=0)
        self._refuses("invalid root tensor", "broadcast", ([one],), rootRank=0, rootTensor=1)
        self._refuses("invalid root tensor", "broadcast", ([],), rootRank=0, rootTensor=0)
        self._refuses("invalid tensor", "broadcast", ([one, double],), rootRank=0, rootTensor=0)

    def test_what_all_reduce_refuses(self) -> None:
        self.group = self.gloo()
        one = torch.zeros(1)
        self._refuses("requires non-empty tensor list", "allreduce", ([],))
        self._refuses("invalid tensor type", "allreduce", ([one, one.double()],))
        self._refuses("invalid tensor size", "allreduce", ([one, torch.zeros(2)],))

    def test_what_reduce_and_scatter_refuse(self) -> None:
        self.group = self.gloo()
        one = torch.zeros(1)
        self._refuses("invalid root rank", "reduce", ([one],), rootRank=-1, rootTensor=0)
        self._refuses(
            "requires a single-element tensor list",
            "reduce",
            ([one, one],),
            rootRank=self.rank,
            rootTensor=0,
        )
        self._refuses("invalid root rank", "scatter", ([one], []), rootRank=-1)
        self._refuses("requires a single-element output", "scatter", ([], []), rootRank=0)
        self._refuses("requires a single-element input", "scatter", ([one], []), rootRank=self.rank)

    def test_what_gather_and_all_gather_refuse(self) -> None:
        self.group = self.gloo()
        one = torch.zeros(1)
        self._refuses("invalid root rank", "gather", ([], [one]), rootRank=-1)
        self._refuses("requires a single-element input", "gather", ([], [one, one]), rootRank=0)
        self._refuses(
            "requires a single-element output list", "gather", ([], [one]), rootRank=self.rank
        )
        self._refuses("requires non-empty input tensor list", "allgather", ([], []))
        self._refuses("requires input/output tensor lists", "allgather", ([], [one]))

    def test_what_it_refuses_leaves_it_usable(self) -> None:
        group = self.gloo()
        with self.assertRaises((RuntimeError, ValueError)):
            group.allreduce([torch.ones(2, dtype=torch.int16)]).wait()
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        self.equal(tensor, torch.full((2,), float(self.world_size)))

    def test_every_reduction(self) -> None:
        group = self.gloo()
        numbers = [float(rank + 1) for rank in self.ranks]
        expected = {
            ReduceOp.SUM: sum(numbers),
            ReduceOp.PRODUCT: torch.tensor(numbers).prod().item(),
            ReduceOp.MIN: min(numbers),
            ReduceOp.MAX: max(numbers),
        }
        for operation, value in expected.items():
            options = dist.AllreduceOptions()
            options.reduceOp = operation
            future = group.allreduce([torch.tensor([self.rank + 1.0])], options).get_future()
            future.wait()
            self.equal(future.value()[0], torch.tensor([value]))

    def test_several_tensors_at_once(self) -> None:
        group = self.gloo()
        tensors = [torch.tensor([self.rank + i + 1.0]) for i in range(2)]
        group.allreduce(tensors).wait()
        total = _total(2 * self.world_size) if self.world_size == 1 else None
        expected = sum(rank + i + 1.0 for rank in self.ranks for i in range(2))
        self.assertIsNone(total)
        for tensor in tensors:
            self.equal(tensor, torch.tensor([expected]))

    def test_many_at_once(self) -> None:
        group = self.gloo()
        works = [group.allreduce([torch.tensor([i + self.rank])]) for i in range(RUNS)]
        for number, work in enumerate(works):
            future = work.get_future()
            future.wait()
            self.equal(
                future.value()[0],
                torch.tensor([number * self.world_size + sum(self.ranks)]),
            )

    def test_coalesced_tensors(self) -> None:
        group = self.gloo()
        tensors = [torch.full((i + 1,), float(self.rank)) for i in range(3)]
        group.allreduce_coalesced(tensors).wait()
        for number, tensor in enumerate(tensors):
            self.equal(tensor, torch.full((number + 1,), float(sum(self.ranks))))

    def test_sparse_tensors(self) -> None:
        group = self.gloo()
        index = torch.tensor([[self.rank]])
        sparse = torch.sparse_coo_tensor(index, torch.ones(1), (self.world_size,))
        future = group.allreduce([sparse]).get_future()
        future.wait()
        self.equal(future.value()[0].to_dense(), torch.ones(self.world_size))

    def test_empty_tensors(self) -> None:
        group = self.gloo()
        group.broadcast([torch.zeros(0)]).wait() if self.rank else None
        if not self.rank:
            group.broadcast([torch.zeros(0)]).wait()
        tensor = torch.zeros(0)
        group.allreduce([tensor]).wait()
        self.assertEqual(tensor.numel(), 0)

    def test_broadcast_from_each_rank(self) -> None:
        group = self.gloo()
        for root in self.ranks:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            tensor = torch.tensor([float(self.rank)])
            group.broadcast([tensor], options).wait()
            self.equal(tensor, torch.tensor([float(root)]))

    def test_scatter_and_gather(self) -> None:
        group = self.gloo()
        for root in self.ranks:
            scatter, gather = dist.ScatterOptions(), dist.GatherOptions()
            scatter.rootRank = gather.rootRank = root
            mine = torch.zeros(1)
            parts = [torch.tensor([float(r)]) for r in self.ranks]
            group.scatter([mine], [parts] if self.rank == root else [], scatter).wait()
            self.equal(mine, torch.tensor([float(self.rank)]))
            got = [torch.zeros(1) for _ in self.ranks]
            group.gather([got] if self.rank == root else [], [mine], gather).wait()
            if self.rank == root:
                self.equal(got, parts)

    def test_all_gather(self) -> None:
        group = self.gloo()
        got = [[torch.zeros(2) for _ in self.ranks]]
        group.allgather(got, [torch.full((2,), float(self.rank))]).wait()
        self.equal(got[0], [torch.full((2,), float(rank)) for rank in self.ranks])

    def test_tensors_that_are_not_contiguous(self) -> None:
        group = self.gloo()
        matrix = torch.arange(6.0).view(2, 3).t()
        got = [[torch.zeros(3, 2) for _ in self.ranks]]
        group.allgather(got, [matrix]).wait()
        self.equal(got[0], [matrix.contiguous()] * self.world_size)

    def test_everyone_sends_to_everyone(self) -> None:
        group = self.gloo()
        others = [rank for rank in self.ranks if rank != self.rank]
        got = {rank: torch.full((1,), -1.0) for rank in others}
        works = [group.send([torch.tensor([float(self.rank)])], rank, 7) for rank in others]
        works += [group.recv([got[rank]], rank, 7) for rank in others]
        for work in works:
            work.wait()
        self.equal(got, {rank: torch.tensor([float(rank)]) for rank in others})

    def test_receiving_from_anyone(self) -> None:
        group = self.gloo()
        if self.rank:
            group.send([torch.tensor([float(self.rank)])], 0, 3).wait()
            return
        sources = set()
        for _ in range(self.world_size - 1):
            tensor = torch.zeros(1)
            work = group.recv_anysource([tensor], 3)
            work.wait()
            self.assertEqual(work._source_rank(), int(tensor.item()))
            sources.add(work._source_rank())
        self.assertEqual(sources, set(self.ranks[1:]))

    def test_a_barrier_waits_for_all(self) -> None:
        group = self.gloo()
        tensors = [torch.full((100, 100), float(i)) for i in range(5)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        group.barrier().wait()
        for work in works:
            work.wait()
        for number, tensor in enumerate(tensors):
            self.equal(tensor, torch.full((100, 100), float(number * self.world_size)))

    def test_it_times_out(self) -> None:
        group = self.gloo(timeout=0.5)
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "[Tt]imed? ?out|closed"):
                group.allreduce([torch.ones(1)]).wait()
        self.store("end").add("ended", 1)
        store = self.store("wait")
        store.add("ended", 1)
        while store.add("ended", 0) < self.world_size:
            pass

    def test_futures_chain(self) -> None:
        group = self.gloo()
        future = group.allreduce([torch.tensor([self.rank + 1.0])]).get_future()
        double = future.then(lambda done: done.value()[0] * 2)
        self.equal(double.wait(), torch.tensor([2 * _total(self.world_size)]))

    def test_reduce_scatter_of_tensors(self) -> None:
        group = self.gloo()
        out = torch.zeros(2)
        group._reduce_scatter_base(out, torch.arange(2.0 * self.world_size)).wait()
        self.equal(out, torch.arange(2.0 * self.rank, 2.0 * self.rank + 2) * self.world_size)

    def test_its_names_and_numbers(self) -> None:
        group = self.gloo()
        self.assertEqual(group.name(), "gloo")
        self.assertEqual((group.rank(), group.size()), (self.rank, self.world_size))
