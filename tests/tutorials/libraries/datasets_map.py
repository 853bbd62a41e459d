"""datasets: split by node, mapped by two processes, read by a loader with workers."""

# %%
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
# %%
data = Dataset.from_dict({"x": list(range(40))})
data = split_dataset_by_node(data, rank=rank, world_size=world)
mapped = data.map(lambda row: {"y": row["x"] ** 2}, num_proc=2)
# %%
loader = DataLoader(mapped.with_format("torch"), batch_size=5, num_workers=2)
total = torch.zeros(1)
for batch in loader:
    total += batch["y"].sum()
mine = total.item()
dist.all_reduce(total)
result = {"mine": mine, "all": total.item(), "rows": len(mapped)}
# %%
dist.destroy_process_group()
