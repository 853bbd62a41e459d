"""Remote calls, remote references, and a distributed backward."""

# %%
import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

if dist.is_initialized():
    dist.destroy_process_group()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
# %%
result = {}
if rank == 0:
    result["sync"] = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)).tolist()
    future = rpc.rpc_async("worker1", torch.mul, args=(torch.ones(2), 5))
    result["async"] = future.wait().tolist()
    reference = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    result["remote"] = reference.to_here().tolist()
# %%
if rank == 0:
    with dist_autograd.context() as context:
        a, b = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        loss = rpc.rpc_sync("worker1", torch.mul, args=(a, b)).sum()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
        result["gradients"] = [gradients[a].tolist(), gradients[b].tolist()]
# %%
rpc.shutdown()
