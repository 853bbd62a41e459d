"""An optimizer whose state is spread over the ranks."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")


# %%
def train(zero):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))))
    if zero:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(20, 16)), torch.zeros(20, 16)).backward()
        optimizer.step()
    if zero:
        optimizer.consolidate_state_dict(to=0)
        kept = len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0
    else:
        kept = len(optimizer.state_dict()["state"])
    return sum(parameter.sum().item() for parameter in model.parameters()), kept


plain, zero = train(zero=False), train(zero=True)
assert abs(plain[0] - zero[0]) < 1e-5
result = {"plain": plain, "zero": zero}
# %%
dist.destroy_process_group()
