"""A communication hook beside uneven inputs: pytorch/pytorch#60611."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
# %%
torch.manual_seed(0)
model = DDP(nn.Linear(2, 1))
model.register_comm_hook(None, default_hooks.allreduce_hook)
with model.join():
    for batch in range(2 + rank):
        model(torch.full((4, 2), float(batch + 1))).mean().backward()
result = {"gradient": model.module.weight.grad.tolist()}
# %%
dist.destroy_process_group()
