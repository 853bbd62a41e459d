"""Lightning Fabric with the ddp strategy."""

# %%
import os

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
# %%
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
# %%
losses = []
for _epoch in range(2):
    for batch, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), target)
        fabric.backward(loss)
        optimizer.step()
    losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
gathered = fabric.all_gather(torch.tensor([float(fabric.global_rank)]))
result = {
    "losses": losses, "world": fabric.world_size, "rank": fabric.global_rank,
    "gathered": gathered.flatten().tolist(), "weight": model.module.weight.sum().item(),
}  # fmt: skip
# %%
import torch.distributed as dist

dist.destroy_process_group()
