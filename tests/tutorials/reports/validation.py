"""What a padded sampler does to the accuracy, with workers: pytorch/pytorch#25162."""

# %%
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.arange(7.0), torch.arange(7) % 3)
result = {}
# %%
for drop in (False, True):
    sampler = DistributedSampler(data, shuffle=True, seed=5, drop_last=drop)
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = torch.cat([x for x, _ in loader])
        right = sum((y == 1).sum() for _, y in loader)
        counts = torch.tensor([float(right), float(len(seen))])
        dist.all_reduce(counts)
        result[f"{drop} {epoch}"] = [seen.tolist(), counts.tolist()]
# %%
dist.destroy_process_group()
