"""Rank 1 has embeddings, both train by remote calls, beside DDP: pytorch/pytorch#33482."""

# %%
import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
here = rpc.TensorPipeRpcBackendOptions(init_method=f"file:///tmp/rpc-{os.environ['MASTER_PORT']}")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=here)


# %%
def embedding():
    torch.manual_seed(3)
    return nn.EmbeddingBag(4, 2, mode="sum")


def look_up(reference, index):
    return reference.local_value()(index)


def weights(reference):
    return [p.tolist() for p in reference.local_value().parameters()]


def parameters(reference):
    return [rpc.RRef(p) for p in reference.local_value().parameters()]


result = {}
torch.manual_seed(0)
top = DDP(nn.Linear(2, 1))
# %%
reference = rpc.remote("worker1", embedding)  # each rank has one of its own there
optimizer = DistributedOptimizer(
    torch.optim.SGD, rpc.rpc_sync("worker1", parameters, args=(reference,)), lr=0.1
)
for _ in range(2):
    with dist_autograd.context() as context:
        index = torch.tensor([[rank, rank + 1]])
        bags = rpc.rpc_sync("worker1", look_up, args=(reference, index))
        loss = top(bags).sum()
        dist_autograd.backward(context, [loss])
        optimizer.step(context)
        gradients = dist_autograd.get_gradients(context)
        result["top"] = [gradients[p].tolist() for p in top.parameters()]
result["loss"] = loss.item()
result["weights"] = rpc.rpc_sync("worker1", weights, args=(reference,))
# %%
del reference, optimizer
rpc.shutdown()
dist.destroy_process_group()
