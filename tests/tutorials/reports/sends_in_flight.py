"""Many sends and receives under way, out of order: pytorch/pytorch#125079, #108378."""

# %%
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank
result = {}
# %%
tags = [3, 0, 2, 1]
sends = [dist.isend(torch.full((2,), 10.0 * rank + tag), other, tag=tag) for tag in range(4)]
got = {tag: torch.zeros(2) for tag in tags}
works = [dist.irecv(got[tag], other, tag=tag) for tag in tags]
for work in [*works, *sends]:
    work.wait()
result["tags"] = {str(tag): tensor.tolist() for tag, tensor in got.items()}
# %% Both send and receive, each in its own order.
one, two = torch.zeros(1), torch.zeros(1)
if rank == 0:
    works = [dist.irecv(one, 1), dist.isend(torch.ones(1), 1), dist.irecv(two, 1)]
else:
    works = [dist.isend(torch.ones(1) * 5, 0), dist.isend(torch.ones(1) * 6, 0), dist.irecv(one, 0)]
for work in works:
    work.wait()
result["interleaved"] = [one.item(), two.item()]
# %% From anyone.
if rank == 0:
    result["source"] = [dist.recv(one), one.item()]
else:
    dist.send(torch.ones(1) * 7, 0)
# %%
dist.destroy_process_group()
