"""Gradients that are accumulated, and added up once: pytorch/pytorch#43201."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(3, 1))
data = torch.randn(8, 3) * (rank + 1)
# %%
with model.no_sync():
    for part in data.split(2)[:-1]:
        (model(part).mean() / 4).backward()
alone = model.module.weight.grad.clone()
(model(data.split(2)[-1]).mean() / 4).backward()
result = {"alone": alone.tolist(), "together": model.module.weight.grad.tolist()}
# %%
dist.destroy_process_group()
