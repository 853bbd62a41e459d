"""A mesh of two dimensions, its subgroups, HSDP on it."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
rank = dist.get_rank()
# %%
tensor = torch.tensor([rank + 1.0])
dist.all_reduce(tensor, group=mesh.get_group("shard"))
alone = torch.tensor([rank + 1.0])
dist.all_reduce(alone, group=mesh.get_group(mesh_dim=0))
# %%
torch.manual_seed(0)
model = nn.Linear(4, 4)
fully_shard(model, mesh=mesh)
loss = model(torch.full((2, 4), rank + 1.0)).square().mean()
loss.backward()
gradient = model.weight.grad.full_tensor().sum().item()
result = {
    "shard": tensor.item(), "replicate": alone.item(), "coordinate": mesh.get_coordinate(),
    "sub": mesh["shard"].size(), "loss": loss.item(), "gradient": gradient,
}  # fmt: skip
# %%
dist.destroy_process_group()
