"""The default group and groups beside it: after test_c10d_common and test_c10d_gloo."""

from __future__ import annotations

import pickle
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import nn as dist_nn
from torch.nn.parallel import DistributedDataParallel

from tests.torch_suites.cases.case import Case

__all__ = ["Common"]


class Common(Case):
    """It runs in a process group of all ranks."""

    # --- groups -------------------------------------------------------------------------------

    def test_the_default_group(self) -> None:
        self.assertTrue(dist.is_initialized())
        self.assertEqual(dist.get_backend(), "gloo")
        self.assertEqual(dist.get_rank(), self.rank)
        self.assertEqual(dist.get_world_size(), self.world_size)
        self.assertEqual(dist.get_process_group_ranks(dist.group.WORLD), list(self.ranks))
        self.assertEqual(dist.get_process_group_ranks(None), list(self.ranks))
        self.assertEqual(dist.get_default_backend_for_device("cpu"), "gloo")

    def test_sequence_numbers_grow_alike(self) -> None:
        group = dist.group.WORLD
        group._set_sequence_number_for_group()
        first = group._get_sequence_number_for_group()
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        self.assertEqual(group._get_sequence_number_for_group(), first + 3)
        numbers = [None] * self.world_size
        dist.all_gather_object(numbers, first)
        self.assertEqual(len(set(numbers)), 1)

    def test_sequence_numbers_of_a_group(self) -> None:
        group = dist.new_group([0, 1])
        if self.rank > 1:
            return
        group._set_sequence_number_for_group()
        first = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1), group=group)
        self.assertEqual(group._get_sequence_number_for_group(), first + 1)

    def test_ranks_in_a_group(self) -> None:
        group = dist.new_group([1, 2])
        if self.rank == 0:
            self.assertIs(group, dist.GroupMember.NON_GROUP_MEMBER)
            self.assertEqual(dist.get_rank(group), -1)
            return
        self.assertEqual(dist.get_rank(group), self.rank - 1)
        self.assertEqual(dist.get_global_rank(group, 0), 1)
        self.assertEqual(dist.get_group_rank(group, 2), 1)
        self.assertEqual(dist.get_process_group_ranks(group), [1, 2])
        with self.assertRaisesRegex(ValueError, "not part of group"):
            dist.get_group_rank(group, 0)

    def test_a_warning_to_whoever_is_not_in_the_group(self) -> None:
        group = dist.new_group([0])
        if self.rank == 0:
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.all_reduce(torch.ones(1), group=group)
        self.assertTrue(any("does not belong" in str(w.message) for w in caught))

    def test_groups_that_members_make_among_themselves(self) -> None:
        mine = [0, 1] if self.rank < 2 else [2]
        group = dist.new_group(mine, use_local_synchronization=True)
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, group=group)
        self.equal(tensor, torch.tensor([float(sum(mine))]))

    def test_groups_that_a_subgroup_makes(self) -> None:
        ranks = [0, 2]
        if self.rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            self.equal(tensor, torch.tensor([2.0]))
            dist.destroy_process_group(group)
        dist.barrier()

    def test_the_same_ranks_twice(self) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        if self.rank < 2:
            a, b = torch.ones(1), torch.ones(1) * 2
            works = [
                dist.all_reduce(a, group=one, async_op=True),
                dist.all_reduce(b, group=two, async_op=True),
            ]
            for work in reversed(works):
                work.wait()
            self.equal([a, b], [torch.tensor([2.0]), torch.tensor([4.0])])

    def test_group_descriptions_and_names(self) -> None:
        group = dist.new_group(group_desc="a description")
        self.assertEqual(group.group_desc, "a description")
        self.assertNotEqual(group.group_name, dist.group.WORLD.group_name)
        self.assertEqual(group.size(), self.world_size)

    def test_subgroups(self) -> None:
        mine, groups = dist.new_subgroups_by_enumeration([[0, 2], [1]])
        self.assertEqual(len(groups), 2)
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, group=mine)
        self.equal(tensor, torch.tensor([1.0 if self.rank == 1 else 2.0]))

    def test_what_new_group_refuses(self) -> None:
        with self.assertRaisesRegex((ValueError, RuntimeError), "should be less|world_size|larger"):
            dist.new_group([0, self.world_size])
        with self.assertRaisesRegex(TypeError, "datetime.timedelta"):
            dist.new_group([0, 1], timeout="forever")
        dist.barrier()

    def test_a_second_default_group_is_refused_or_is_the_same(self) -> None:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.equal(tensor, torch.tensor([float(self.world_size)]))

    def test_a_group_survives_many_others(self) -> None:
        for _ in range(10):
            group = dist.new_group()
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            self.equal(tensor, torch.tensor([float(self.world_size)]))
            dist.destroy_process_group(group)
        dist.barrier()

    # --- operations ---------------------------------------------------------------------------

    def test_reduce_scatter_with_a_size_for_each_rank(self) -> None:
        parts = [torch.full((rank + 1,), float(rank)) for rank in self.ranks]
        out = torch.empty(self.rank + 1)
        dist.reduce_scatter(out, parts)
        self.equal(out, torch.full((self.rank + 1,), float(self.rank * self.world_size)))
        work = dist.reduce_scatter(out, parts, async_op=True)
        work.wait()
        self.equal(out, torch.full((self.rank + 1,), float(self.rank * self.world_size)))

    def test_all_gather_with_a_size_for_each_rank(self) -> None:
        got = [torch.zeros(rank + 1) for rank in self.ranks]
        with self.assertRaises((RuntimeError, ValueError)):
            dist.all_gather(got, torch.ones(self.rank + 1, dtype=torch.float64))
        dist.barrier()

    def test_all_to_all_with_splits(self) -> None:
        send = [rank + self.rank for rank in self.ranks]
        receive = [self.rank + rank for rank in self.ranks]
        out = torch.empty(sum(receive))
        data = torch.full((sum(send),), float(self.rank))
        dist.all_to_all_single(out, data, receive, send)
        self.equal(out, torch.cat([torch.full((n,), float(r)) for r, n in enumerate(receive)]))

    def test_what_all_to_all_refuses(self) -> None:
        for receive, send, said in (
            ([9, 0, 0], [1, 1, 1], "Split sizes doesn't match"),
            ([1, 1, 1], [1, 1], "Number of tensor splits not equal"),
        ):
            with self.assertRaisesRegex(RuntimeError, said):
                dist.all_to_all_single(torch.zeros(3), torch.zeros(3), receive, send)
        with self.assertRaises((RuntimeError, IndexError)):
            dist.all_to_all_single(torch.tensor(0.0), torch.tensor(0.0))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.equal(tensor, torch.tensor([float(self.world_size)]))

    def test_functions_with_gradients(self) -> None:
        x = torch.tensor([self.rank + 1.0], requires_grad=True)
        total = dist_nn.all_reduce(x)
        (total * (self.rank + 1)).sum().backward()
        weights = sum(rank + 1.0 for rank in self.ranks)
        self.equal([total.detach(), x.grad], [torch.tensor([weights])] * 2)

    def test_dtypes_that_gloo_does_not_add(self) -> None:
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn):
            with self.assertRaisesRegex(
                RuntimeError, "Invalid scalar type|not supported|nsupported"
            ):
                dist.all_reduce(torch.zeros(2, dtype=dtype))
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            self.equal(tensor, torch.full((2,), float(self.world_size)))

    def test_reductions_that_gloo_does_not_have(self) -> None:
        for operation, tensor in (
            (dist.ReduceOp.BXOR, torch.ones(2)),
            (dist.ReduceOp.BAND, torch.ones(2)),
        ):
            with self.assertRaises((RuntimeError, ValueError)):
                dist.all_reduce(tensor, operation)
            other = torch.ones(2)
            dist.all_reduce(other)
            self.equal(other, torch.full((2,), float(self.world_size)))

    def test_an_average(self) -> None:
        tensor = torch.tensor([float(self.rank)])
        try:
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
        except (RuntimeError, ValueError) as error:
            self.assertIn("AVG", str(error).upper())
        else:
            self.equal(tensor, torch.tensor([float(sum(self.ranks)) / self.world_size]))
        dist.barrier()

    def test_complex_numbers(self) -> None:
        tensor = torch.tensor([complex(self.rank, 1)])
        dist.all_reduce(tensor)
        self.equal(tensor, torch.tensor([complex(sum(self.ranks), self.world_size)]))
        got = [torch.zeros(1, dtype=torch.complex64) for _ in self.ranks]
        dist.all_gather(got, torch.tensor([complex(self.rank, -1)]))
        self.equal(got, [torch.tensor([complex(rank, -1)]) for rank in self.ranks])
        with self.assertRaisesRegex((RuntimeError, ValueError), "complex"):
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        dist.barrier()

    def test_booleans_and_bytes(self) -> None:
        got = [torch.zeros(2, dtype=torch.bool) for _ in self.ranks]
        dist.all_gather(got, torch.tensor([True, self.rank == 1]))
        self.equal(got, [torch.tensor([True, rank == 1]) for rank in self.ranks])
        tensor = torch.tensor([self.rank], dtype=torch.uint8)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        self.equal(tensor, torch.tensor([self.world_size - 1], dtype=torch.uint8))

    def test_what_the_front_checks(self) -> None:
        with self.assertRaisesRegex(TypeError, "Tensor"):
            dist.all_reduce([torch.ones(1)])
        with self.assertRaisesRegex(TypeError, "Tensor"):
            dist.all_gather(torch.ones(1), torch.ones(1))
        with self.assertRaisesRegex((ValueError, RuntimeError), "group|rank|root"):
            dist.broadcast(torch.ones(1), src=self.world_size)
        with self.assertRaisesRegex((ValueError, TypeError), "P2POp|list"):
            dist.batch_isend_irecv([1])
        with self.assertRaises((ValueError, TypeError, IndexError)):
            dist.batch_isend_irecv([])
        with self.assertRaisesRegex(ValueError, "src|dst|rank"):
            dist.send(torch.ones(1), dst=self.rank)
        with self.assertRaisesRegex((RuntimeError, ValueError), "dtype|type"):
            dist.all_gather([torch.zeros(1) for _ in self.ranks], torch.ones(1).double())
        with self.assertRaises((RuntimeError, ValueError, TypeError)):
            dist.gather(torch.ones(1), [torch.ones(1)], dst=(self.rank + 1) % self.world_size)
        dist.barrier()

    def test_batches_of_sends_and_receives(self) -> None:
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        out, got = torch.tensor([float(self.rank)]), torch.zeros(1)
        operations = [
            dist.P2POp(dist.isend, out, after),
            dist.P2POp(dist.irecv, got, before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.equal(got, torch.tensor([float(before)]))

    def test_tags(self) -> None:
        if self.rank == 0:
            works = [dist.isend(torch.tensor([float(t)]), 1, tag=t) for t in (1, 2, 3)]
            for work in works:
                work.wait()
        elif self.rank == 1:
            for tag in (3, 1, 2):
                tensor = torch.zeros(1)
                self.assertEqual(dist.recv(tensor, 0, tag=tag), 0)
                self.equal(tensor, torch.tensor([float(tag)]))
        dist.barrier()

    def test_coalescing(self) -> None:
        tensors = [torch.full((2,), float(self.rank + i)) for i in range(3)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        for number, tensor in enumerate(tensors):
            self.equal(tensor, torch.full((2,), float(sum(r + number for r in self.ranks))))

    def test_into_tensors(self) -> None:
        out = torch.zeros(self.world_size, 2)
        dist.all_gather_into_tensor(out, torch.full((1, 2), float(self.rank)))
        self.equal(out, torch.tensor([[float(r)] * 2 for r in self.ranks]))
        mine = torch.zeros(2)
        dist.reduce_scatter_tensor(mine, torch.arange(2.0 * self.world_size))
        self.equal(mine, torch.arange(2.0 * self.rank, 2.0 * self.rank + 2) * self.world_size)
        group = dist.group.WORLD
        outs = [torch.zeros(self.world_size * n) for n in (1, 2)]
        group.allgather_into_tensor_coalesced(outs, [torch.ones(n) for n in (1, 2)]).wait()
        self.equal(outs, [torch.ones(self.world_size * n) for n in (1, 2)])
        outs = [torch.zeros(n) for n in (1, 2)]
        group.reduce_scatter_tensor_coalesced(
            outs, [torch.ones(self.world_size * n) for n in (1, 2)]
        ).wait()
        self.equal(outs, [torch.full((n,), float(self.world_size)) for n in (1, 2)])

    def test_a_monitored_barrier_names_who_is_missing(self) -> None:
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "Rank 1 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.5))
        store = self.store("told")
        store.add("told", 1)
        while store.add("told", 0) < self.world_size:
            pass

    def test_works(self) -> None:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        self.assertTrue(work.wait())
        self.assertTrue(work.is_completed())
        self.assertTrue(work.is_success())
        self.assertIsNone(work.exception())
        self.assertEqual(work.get_future().wait()[0].item(), self.world_size)
        self.equal(work.result()[0], torch.tensor([float(self.world_size)]))

    def test_works_that_nobody_keeps(self) -> None:
        tensors = [torch.ones(10) for _ in range(50)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        for tensor in tensors:
            self.equal(tensor, torch.full((10,), float(self.world_size)))

    def test_reduce_operations_are_values(self) -> None:
        operation = dist.ReduceOp.SUM
        self.assertEqual(pickle.loads(pickle.dumps(operation)), operation)
        self.assertNotEqual(dist.ReduceOp.SUM, dist.ReduceOp.MAX)
        self.assertEqual(dist.ReduceOp("sum") if False else operation, dist.ReduceOp.SUM)

    # --- objects ------------------------------------------------------------------------------

    def test_objects(self) -> None:
        mine = {"rank": self.rank, "list": [self.rank] * 3}
        got = [None] * self.world_size
        dist.all_gather_object(got, mine)
        self.assertEqual([g["rank"] for g in got], list(self.ranks))
        for root in self.ranks:
            got = [None] * self.world_size if self.rank == root else None
            dist.gather_object(mine, got, dst=root)
            if got:
                self.assertEqual([g["list"] for g in got], [[r] * 3 for r in self.ranks])
            objects = [f"from {root}" if self.rank == root else None, None]
            dist.broadcast_object_list(objects, src=root)
            self.assertEqual(objects, [f"from {root}", None])
            out = [None]
            dist.scatter_object_list(out, [f"to {r}" for r in self.ranks], src=root)
            self.assertEqual(out, [f"to {self.rank}"])

    def test_objects_in_a_group(self) -> None:
        ranks = [1, 2]
        group = dist.new_group(ranks)
        if self.rank in ranks:
            got = [None] * 2
            dist.all_gather_object(got, self.rank, group=group)
            self.assertEqual(got, ranks)
            objects = [self.rank]
            dist.broadcast_object_list(objects, group=group, group_src=1)
            self.assertEqual(objects, [2])
            out = [None]
            dist.scatter_object_list(out, ["a", "b"], group=group, group_src=0)
            self.assertEqual(out, ["ab"[self.rank - 1]])
            got = [None] * 2 if self.rank == 2 else None
            dist.gather_object(self.rank, got, group=group, group_dst=1)
            self.assertEqual(got, ranks if self.rank == 2 else None)
        dist.barrier()

    def test_lists_of_objects_from_one_to_another(self) -> None:
        if self.rank == 0:
            dist.send_object_list([{"a": 1}, "b", [3]], dst=1)
        elif self.rank == 1:
            got = [None] * 3
            self.assertEqual(dist.recv_object_list(got, src=0), 0)
            self.assertEqual(got, [{"a": 1}, "b", [3]])
        dist.barrier()

    def test_objects_of_very_different_sizes(self) -> None:
        got = [None] * self.world_size
        dist.all_gather_object(got, "x" * 10 ** (2 * self.rank))
        self.assertEqual([len(g) for g in got], [10 ** (2 * r) for r in self.ranks])

    # --- DistributedDataParallel, and its reducer -----------------------------------------------

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))

    def _reference(self) -> list[torch.Tensor]:
        model = self._model()
        data = torch.arange(2.0 * self.world_size).view(-1, 2)
        model(data).mean().backward()
        return [p.grad for p in model.parameters()]

    def _close(self, model: nn.Module) -> None:
        for parameter, grad in zip(model.parameters(), self._reference(), strict=True):
            torch.testing.assert_close(parameter.grad, grad)

    def _data(self) -> torch.Tensor:
        return torch.arange(2.0 * self.rank, 2.0 * self.rank + 2).view(1, 2)

    def test_gradients(self) -> None:
        for arguments in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"bucket_cap_mb": 1e-5},
        ):
            model = DistributedDataParallel(self._model(), **arguments)
            for _ in range(2):
                model.zero_grad()
                model(self._data()).mean().backward()
                self._close(model)

    def test_a_hook_that_passes_futures_on(self) -> None:
        model = DistributedDataParallel(self._model())

        def hook(state, bucket):  # no annotations, for torch compares them
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / self.world_size)

        model.register_comm_hook(None, hook)
        for _ in range(2):
            model.zero_grad()
            model(self._data()).mean().backward()
            self._close(model)

    def test_what_hooks_are_refused(self) -> None:
        model = DistributedDataParallel(self._model())
        with self.assertRaisesRegex(TypeError, "callable"):
            model.register_comm_hook(None, 1)
        with self.assertRaisesRegex(ValueError, "annotation"):
            model.register_comm_hook(None, _wrong_hook)
        model.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
        with self.assertRaisesRegex(RuntimeError, "register_comm_hook|builtin_comm_hook"):
            model.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))

    def test_sparse_gradients(self) -> None:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.EmbeddingBag(4, 2, sparse=True))
        model(torch.tensor([[self.rank]])).sum().backward()
        grad = model.module.weight.grad
        self.assertTrue(grad.is_sparse)
        expected = torch.zeros(4, 2)
        expected[: self.world_size] = 1 / self.world_size
        torch.testing.assert_close(grad.to_dense(), expected)

    def test_outputs_that_are_ignored(self) -> None:
        model = DistributedDataParallel(self._model(), find_unused_parameters=True)
        for _ in range(3):
            model(self._data())
        model(self._data()).mean().backward()
        self._close(model)

    def test_a_reducer_that_is_made_directly(self) -> None:
        model = self._model()
        parameters = list(model.parameters())
        reducer = dist.Reducer(
            parameters, [list(range(len(parameters)))], [len(parameters)], dist.group.WORLD
        )
        loss = model(self._data()).mean()
        reducer.prepare_for_backward([loss])
        loss.backward()
        self._close(model)

    def test_a_broadcast_in_buckets(self) -> None:
        tensors = [torch.full((10,), float(self.rank + i)) for i in range(4)]
        dist._broadcast_coalesced(dist.group.WORLD, tensors, 64, 0)
        for number, tensor in enumerate(tensors):
            self.equal(tensor, torch.full((10,), float(number)))

    def test_shapes_that_differ_are_refused(self) -> None:
        model = nn.Linear(2, 2 + self.rank)
        # Rank 0 has the shapes that others are compared with, and waits for them in vain.
        said = "appears not to match" if self.rank else ""
        with self.assertRaisesRegex(RuntimeError, said):
            DistributedDataParallel(model)

    def test_what_ddp_logs(self) -> None:
        model = DistributedDataParallel(self._model())
        data = model._get_ddp_logging_data()
        self.assertEqual(data["backend_name"], "gloo")
        self.assertEqual(data["world_size"], self.world_size)
        self.assertEqual(data["rank"], self.rank)

    def test_uneven_inputs(self) -> None:
        for by_initial in (True, False):
            model = DistributedDataParallel(self._model())
            with model.join(divide_by_initial_world_size=by_initial):
                for _ in range(self.rank + 1):
                    model(self._data()).mean().backward()
        dist.barrier()


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def _wrong_hook(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError(bucket)
