"""Batch norm on CPUs, its buffers, SyncBatchNorm: pytorch/pytorch#22095, #78078."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
result = {}
# %%
for broadcast in (True, False):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), broadcast_buffers=broadcast)
    for _ in range(3):
        model(torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * (rank + 1)).sum().backward()
    result[f"buffers {broadcast}"] = model.module[1].running_mean.tolist()
# %%
synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
for name, refused in {
    "ddp": lambda: DDP(synced),
    "forward": lambda: synced(torch.ones(2, 3)),
}.items():
    try:
        refused()
    except ValueError as error:
        result[name] = str(error)
result["evaluated"] = synced.eval()(torch.ones(2, 3)).tolist()
# %%
dist.destroy_process_group()
