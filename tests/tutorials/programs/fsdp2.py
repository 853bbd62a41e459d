"""fully_shard on every layer, gradient clipping, and a full state dict at the end."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


# %%
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        )  # fmt: skip

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(*(Block(8) for _ in range(2)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
x, y = torch.randn(16, 8), torch.randn(16, 8)
losses = []
for _ in range(3):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
# %%
state = get_model_state_dict(
    model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
)
result = {
    "losses": losses, "norm": norm.item(),
    "state": sum(value.double().sum().item() for value in state.values()), "names": sorted(state),
}  # fmt: skip
# %%
dist.destroy_process_group()
