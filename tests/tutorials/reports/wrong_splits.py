"""Splits that do not add up are refused, and what follows is right: pytorch/pytorch#101380."""

# %%
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
result = {}
# %%
for name, sizes in {
    "too many": ([3, 3], [2, 2]),
    "another number": ([1, 1, 2], [2, 2]),
    "of the input": ([2, 2], [1, 1]),
}.items():
    try:
        dist.all_to_all_single(torch.zeros(4), torch.arange(4.0), *sizes)
    except (RuntimeError, ValueError) as error:
        result[name] = str(error).splitlines()[0][:20]
    out = torch.ones(2)
    dist.all_reduce(out)
    result[f"after {name}"] = out.tolist()
# %%
dist.destroy_process_group()
