"""Tensors that cannot be cut evenly: pytorch/pytorch#103306, #115310, #162692."""

# %%
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
whole = torch.arange(15.0).view(5, 3)
result = {}
# %%
for dim in (0, 1):
    part = distribute_tensor(whole, mesh, [Shard(dim)])
    back = part.redistribute(placements=[Replicate()]).to_local()
    other = part.redistribute(placements=[Shard(1 - dim)])
    result[f"shard {dim}"] = [part.to_local().tolist(), back.tolist(), other.to_local().tolist()]
    result[f"mean {dim}"] = [part.mean().full_tensor().item(), part.max().full_tensor().item()]
# %%
partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
result["partial"] = [
    partial.redistribute(placements=[Shard(0)]).to_local().tolist(),
    partial.full_tensor().tolist(),
]
# %%
x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
y = distribute_tensor(whole.t().contiguous(), mesh, [Replicate()]).requires_grad_()
(x @ y).sum().backward()
result["gradients"] = [x.grad.full_tensor().tolist(), y.grad.full_tensor().tolist()]
# %%
dist.destroy_process_group()
