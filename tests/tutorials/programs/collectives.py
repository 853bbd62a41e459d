"""Every collective once, objects and subgroups too."""

# %%
import torch
import torch.distributed as dist

dist.init_process_group(backend="gloo", init_method="env://")
rank, world = dist.get_rank(), dist.get_world_size()
result = {}
# %%
tensor = torch.arange(2.0) + rank
dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
result["all_reduce"] = tensor.tolist()
tensor = torch.full((2,), float(rank))
dist.broadcast(tensor, src=1)
result["broadcast"] = tensor.tolist()
tensor = torch.full((2,), rank + 1.0)
dist.reduce(tensor, dst=0, op=dist.ReduceOp.PRODUCT)
result["reduce"] = tensor.tolist() if rank == 0 else None
# %%
parts = [torch.empty(2) for _ in range(world)]
dist.all_gather(parts, torch.full((2,), float(rank)))
result["all_gather"] = torch.stack(parts).tolist()
gathered = [torch.empty(1) for _ in range(world)] if rank == 0 else None
dist.gather(torch.tensor([rank * 2.0]), gathered, dst=0)
result["gather"] = None if gathered is None else torch.cat(gathered).tolist()
mine = torch.empty(2)
dist.scatter(mine, [torch.full((2,), 7.0 + r) for r in range(world)] if rank == 0 else None, src=0)
result["scatter"] = mine.tolist()
# %%
swapped = list(torch.empty(2 * world).chunk(world))
dist.all_to_all(swapped, list((torch.arange(2.0 * world) + 10 * rank).chunk(world)))
result["all_to_all"] = torch.cat(swapped).tolist()
out = torch.empty(2)
dist.reduce_scatter_tensor(out, torch.arange(2.0 * world) * (rank + 1))
result["reduce_scatter"] = out.tolist()
# %%
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank, "name": "x" * (rank + 1)})
result["objects"] = objects
common = [{"lr": 0.1}] if rank == 0 else [None]
dist.broadcast_object_list(common, src=0)
result["common"] = common
# %%
group = dist.new_group([0, 1])
tensor = torch.ones(1) * rank
work = dist.all_reduce(tensor, group=group, async_op=True)
work.wait()
result["group"] = tensor.item()
only = dist.new_group([1])
if rank == 1:
    dist.all_reduce(tensor, group=only)
dist.barrier()
# %%
dist.destroy_process_group()
