"""The state of a sharded optimizer, put together: pytorch/pytorch#60284, pytorch/pytorch#54736."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
for _ in range(2):
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    optimizer.step()
result = {"weights": [p.tolist() for p in model.parameters()]}
# %%
try:
    optimizer.state_dict()
except RuntimeError as error:
    result["before"] = "consolidate_state_dict" in str(error)
optimizer.consolidate_state_dict(to=1)
if rank == 1:
    state = optimizer.state_dict()["state"]
    result["state"] = {str(k): v["exp_avg"].flatten().tolist() for k, v in state.items()}
# %%
dist.destroy_process_group()
