"""Distributed SGD without DDP: partitioned data, averaged gradients."""

# %%
import random

import torch
import torch.distributed as dist
from torch import nn, optim

dist.init_process_group("gloo")


# %%
class Partition(torch.utils.data.Dataset):
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, position):
        return self.data[self.index[position]]


def partition(data, world, rank, seed=1234):
    order = list(range(len(data)))
    random.Random(seed).shuffle(order)
    return Partition(data, order[rank::world])


# %%
torch.manual_seed(1234)
x = torch.randn(64, 10)
y = (x.sum(1) > 0).long()
data = partition(list(zip(x, y, strict=True)), dist.get_world_size(), dist.get_rank())
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


# %%
def average_gradients(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= size


losses = []
for _epoch in range(3):
    total = 0.0
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target)
        total += loss.item()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    losses.append(total / len(loader))
result = {"losses": losses, "weight": model[0].weight.sum().item()}
assert losses[-1] < losses[0]
# %%
dist.destroy_process_group()
