"""FSDP2 that adds gradients up later, and mixes precisions: pytorch/pytorch#118298."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
result = {}
# %%
for name, policy in {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}.items():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(torch.full((2, 3), rank + step + 1.0)).float().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    result[name] = [norm.full_tensor().item()]
    result[name] += [p.grad.full_tensor().tolist() for p in model.parameters()]
# %%
dist.destroy_process_group()
