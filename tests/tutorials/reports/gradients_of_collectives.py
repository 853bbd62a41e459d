"""Collectives that autograd knows: pytorch/pytorch#120386, #58005, and #153016."""

# %%
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import nn as dist_nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
result = {}
# %%
x = torch.full((2, 3), rank + 1.0, requires_grad=True)
gathered = torch.stack(dist_nn.all_gather(x.t()))  # not contiguous
(gathered * torch.arange(gathered.numel()).view_as(gathered)).sum().backward()
result["all_gather"] = x.grad.tolist()
# %%
x = torch.full((4,), rank + 1.0, requires_grad=True)
(dist_nn.all_reduce(x * 2) * (rank + 1)).sum().backward()
result["all_reduce"] = x.grad.tolist()
# %%
x = torch.full((4,), rank + 1.0, requires_grad=True)
out = dist_nn.reduce_scatter(torch.empty(2), list(x.chunk(2)))
(out * (rank + 1)).sum().backward()
result["reduce_scatter"] = [out.tolist(), x.grad.tolist()]
# %%
x = torch.full((2,), rank + 1.0, requires_grad=True)
out = functional.all_gather_tensor_autograd(x, 0, list(range(world)))
(out * (rank + 1)).sum().backward()
result["functional"] = [out.tolist(), x.grad.tolist()]
# %%
dist.destroy_process_group()
