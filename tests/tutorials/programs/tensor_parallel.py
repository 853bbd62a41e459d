"""Megatron's two linear layers, split by columns and by rows."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


# %%
class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.out_proj(torch.relu(self.in_proj(x)))


torch.manual_seed(0)
reference = FeedForward()
torch.manual_seed(0)
model = parallelize_module(
    FeedForward(), mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
)
# %%
torch.manual_seed(7)
x = torch.randn(5, 8)
out, expected = model(x), reference(x)
torch.testing.assert_close(out, expected)
out.sum().backward()
gradient = model.in_proj.weight.grad.full_tensor().sum().item()
# %%
whole = torch.arange(16.0).reshape(4, 4)
by_rows = distribute_tensor(whole, mesh, [Shard(0)])
product = by_rows @ distribute_tensor(whole, mesh, [Replicate()])
by_columns = product.redistribute(mesh, [Shard(1)])
result = {
    "out": out.sum().item(), "gradient": gradient, "local": list(by_columns.to_local().shape),
    "product": by_columns.full_tensor().sum().item(),
}  # fmt: skip
# %%
dist.destroy_process_group()
