"""torch.distributed.checkpoint: save sharded, load into another model, synchronously and not."""

# %%
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
path = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(path, src=0)


# %%
class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )  # fmt: skip


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optimizer = make(0)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
# %%
dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=f"{path[0]}/sync")
writing = dcp.async_save({"app": AppState(model, optimizer)}, checkpoint_id=f"{path[0]}/async")
writing.result()


# %%
def total(model):
    return [parameter.full_tensor().sum().item() for parameter in model.parameters()]


loaded = {}
for name in ("sync", "async"):
    other, its = make(5)
    assert total(other) != total(model)
    dcp.load({"app": AppState(other, its)}, checkpoint_id=f"{path[0]}/{name}")
    loaded[name] = total(other)
assert loaded["sync"] == loaded["async"] == total(model)
dist.barrier()
if rank == 0:
    shutil.rmtree(path[0])
result = loaded
# %%
dist.destroy_process_group()
