"""Stages that send to each other on gloo, under a recorded main: pytorch/pytorch#132644."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


@record
def main():
    torch.manual_seed(rank)
    part = nn.Linear(4, 4)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(9)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    losses = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    return {"losses": [loss.item() for loss in losses], "gradient": part.weight.grad.tolist()}


# %%
result = main()
# %%
dist.destroy_process_group()
