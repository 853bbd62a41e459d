"""Parameters without a gradient, by each of DDP's options: pytorch/pytorch#79171, #97030."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x, which):
        return getattr(self, which)(x) + self.c(x)


# %%
result = {}
torch.manual_seed(0)
model = DDP(Branches(), find_unused_parameters=True)
for step in range(3):
    model.zero_grad()
    model(torch.ones(1, 2) * (rank + 1), "ab"[(rank + step) % 2]).sum().backward()
    result[f"step {step}"] = [p.grad.tolist() for p in model.parameters()]
# %%
model = DDP(Branches(), static_graph=True)
for _ in range(2):
    model.zero_grad()
    model(torch.ones(1, 2) * (rank + 1), "a").sum().backward()
result["static"] = [p.grad is None for p in model.parameters()]
# %%
model = DDP(Branches())
model(torch.ones(1, 2), "a").sum().backward()
try:
    model(torch.ones(1, 2), "a").sum().backward()
except RuntimeError as error:
    result["refused"] = "find_unused_parameters=True" in str(error)
# %%
dist.destroy_process_group()
