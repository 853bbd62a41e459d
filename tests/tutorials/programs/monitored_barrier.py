"""A barrier that names the rank that does not come."""

# %%
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.monitored_barrier(timeout=timedelta(seconds=20))
# %%
said = ""
if rank == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        said = str(error)
result = {"names_rank_1": "1" in said, "failed": bool(said) == (rank == 0)}
