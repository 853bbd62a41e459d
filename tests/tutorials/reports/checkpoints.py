"""A model and its optimizer, saved by all ranks and cut anew: pytorch/pytorch#91205."""

# %%
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
name = [tempfile.mkdtemp()] if rank == 0 else [None]
dist.broadcast_object_list(name)


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def whole(model):
    return [p.full_tensor().tolist() for p in model.parameters()]


# %%
model, optimizer = make(0)
model(torch.full((2, 3), rank + 1.0)).sum().backward()
optimizer.step()
saved, states = get_state_dict(model, optimizer)
uneven = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
dcp.save({"model": saved, "optimizer": states, "uneven": uneven}, checkpoint_id=name[0])
# %%
other, again = make(1)
empty, nothing = get_state_dict(other, again)
cut = DTensor.from_local(torch.zeros(3), mesh, [Replicate()])
state = {"model": empty, "optimizer": nothing, "uneven": cut}
dcp.load(state, checkpoint_id=name[0])
set_state_dict(other, again, model_state_dict=empty, optim_state_dict=nothing)
for one, opt in ((model, optimizer), (other, again)):
    opt.zero_grad()
    one(torch.full((2, 3), rank + 2.0)).sum().backward()
    opt.step()
result = {
    "same": whole(model) == whole(other),
    "weights": whole(other),
    "uneven": cut.to_local().tolist(),
}
dist.barrier()
if rank == 0:
    shutil.rmtree(name[0])
# %%
dist.destroy_process_group()
