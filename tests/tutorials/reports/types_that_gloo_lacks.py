"""Types that gloo does not add: pytorch/pytorch#111131, Lightning-AI/torchmetrics#1809."""

# %%
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
result = {}
# %%
for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.uint8):
    for operation in ("all_reduce", "broadcast", "all_gather"):
        if rank:
            time.sleep(0.005)
        tensor = torch.ones(3).to(dtype)
        try:
            if operation == "all_reduce":
                dist.all_reduce(tensor)
            elif operation == "broadcast":
                dist.broadcast(tensor, 0)
            else:
                dist.all_gather([torch.zeros_like(tensor) for _ in range(world)], tensor)
            said = str(tensor.tolist())
        except RuntimeError as error:
            said = "Invalid scalar type" if "Invalid scalar type" in str(error) else str(error)
        check = torch.full((2,), rank + 1.0)
        dist.all_reduce(check)
        result[f"{dtype} {operation}"] = [said, check.tolist()]
# %%
dist.destroy_process_group()
