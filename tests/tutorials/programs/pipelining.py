"""Two stages, GPipe's schedule, four micro-batches."""

# %%
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world)
# %%
torch.manual_seed(0)
layers = [nn.Linear(8, 8), nn.Linear(8, 3)]
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()) if rank == 0 else nn.Linear(8, 3)
model.load_state_dict(
    {(f"0.{name}" if rank == 0 else name): v for name, v in layers[rank].state_dict().items()}
)
stage = PipelineStage(model, rank, world, torch.device("cpu"))
# %%
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
torch.manual_seed(1)
x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
losses = []
if rank == 0:
    schedule.step(x)
else:
    schedule.step(target=y, losses=losses)
# %%
whole = nn.Sequential(layers[0], nn.ReLU(), layers[1])
expected = nn.functional.cross_entropy(whole(x), y).item()
mean = torch.stack(losses).mean().item() if losses else expected
gradient = sum(parameter.grad.abs().sum().item() for parameter in model.parameters())
assert abs(mean - expected) < 1e-5
result = {"loss": mean, "gradient": gradient}
# %%
dist.destroy_process_group()
