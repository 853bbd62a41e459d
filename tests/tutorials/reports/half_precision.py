"""Mixed precision on CPUs with a scaler, and bfloat16 hooks: pytorch/pytorch#111131."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
result = {}
# %%
for name, hook in {"none": None, "fp16": default_hooks.fp16_compress_hook}.items():
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.full((2, 4), rank + step + 0.5)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    result[name] = [scaler.get_scale(), *(p.tolist() for p in model.parameters())]
# %%
dist.destroy_process_group()
