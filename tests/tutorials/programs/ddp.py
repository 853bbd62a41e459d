"""DistributedDataParallel as its tutorial begins: setup, train, checkpoint, cleanup."""

# %%
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


# %%
def demo_basic(rank, world_size):
    torch.manual_seed(rank)  # DDP sends rank 0's parameters to all
    model = DDP(ToyModel())
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10))
    nn.functional.mse_loss(outputs, torch.randn(20, 5)).backward()
    optimizer.step()
    return model.module.net1.weight.sum().item()


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
setup(rank, world)
basic = demo_basic(rank, world)


# %%
def demo_checkpoint(rank, world_size):
    torch.manual_seed(0)
    model = DDP(ToyModel())
    path = [os.path.join(tempfile.mkdtemp(), "model.checkpoint") if rank == 0 else ""]
    dist.broadcast_object_list(path, src=0)
    if rank == 0:
        torch.save(model.state_dict(), path[0])
    dist.barrier()
    with torch.no_grad():
        model.module.net1.weight.add_(1)
    model.load_state_dict(torch.load(path[0], weights_only=True))
    loss = nn.functional.mse_loss(model(torch.ones(20, 10)), torch.ones(20, 5))
    loss.backward()
    dist.barrier()
    if rank == 0:
        os.remove(path[0])
    return loss.item()


checkpoint = demo_checkpoint(rank, world)
result = {"basic": basic, "checkpoint": checkpoint}
# %%
cleanup()  # under torchrun once only: in its store a second group finds what the first has left
