"""An all_to_all for gloo made of a batch of sends and receives: pytorch/pytorch#88245."""

# %%
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
result = {}


def all_to_all(parts):
    shapes = [None] * world
    dist.all_gather_object(shapes, [tuple(part.shape) for part in parts])
    out = [torch.empty(shapes[other][rank]) for other in range(world)]
    out[rank] = parts[rank]
    others = [other for other in range(world) if other != rank]
    batch = [dist.P2POp(dist.isend, parts[other], other) for other in others]
    batch += [dist.P2POp(dist.irecv, out[other], other) for other in others]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return out


# %%
parts = [torch.arange(float(rank + other + 1)) + 10 * rank for other in range(world)]
result["out"] = [part.tolist() for part in all_to_all(parts)]
# %%
for name, wrong in {"nothing": [], "no operations": [1], "a word": "isend"}.items():
    try:
        dist.batch_isend_irecv(wrong)
    except Exception as error:
        result[name] = [type(error).__name__, str(error)[:30]]
# %%
dist.destroy_process_group()
