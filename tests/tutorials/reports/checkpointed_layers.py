"""Activations computed again, by one layer twice: pytorch/pytorch#69060, microsoft/FocalNet#4."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank = dist.get_rank()


class Twice(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


# %%
result = {}
for reentrant, static in ((False, False), (False, True), (True, True)):
    torch.manual_seed(0)
    model = DDP(Twice(reentrant), static_graph=static)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((2, 4), rank + 1.0, requires_grad=True)).sum().backward()
    result[f"{reentrant} {static}"] = model.module.first.weight.grad.tolist()
# %% A layer twice in a reentrant way, without a static graph, is refused.
model = DDP(Twice(True))
try:
    model(torch.full((2, 4), rank + 1.0, requires_grad=True)).sum().backward()
except RuntimeError as error:
    result["refused"] = "ready twice" in str(error) or "ready only once" in str(error)
# %%
dist.destroy_process_group()
