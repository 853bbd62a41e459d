"""A broadcast with a gradient, in a group whose numbers are others: pytorch/pytorch#130515."""

# %%
import torch
import torch.distributed as dist
from torch.distributed import nn as dist_nn

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([1])
result = {}
# %%
x = torch.full((2,), rank + 1.0, requires_grad=True)
out = dist_nn.broadcast(x, src=0)
(out * (rank + 2)).sum().backward()
result["all"] = [out.tolist(), x.grad.tolist()]
# %%
if rank == 1:
    x = torch.full((2,), 5.0, requires_grad=True)
    out = dist_nn.broadcast(x, src=1, group=group)
    out.sum().backward()
    result["group"] = [out.tolist(), x.grad.tolist()]
# %%
dist.destroy_process_group()
