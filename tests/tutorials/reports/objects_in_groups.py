"""Objects in groups whose numbers are not those of all: pytorch/pytorch#74602, #149200."""

# %%
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
alone = dist.new_group([1])
turned = dist.new_group([1, 0])
result = {}
# %%
if rank == 1:
    out = [None]
    dist.scatter_object_list(out, [{"for": "me"}], src=1, group=alone)
    dist.broadcast_object_list(out, group=alone, group_src=0)
    result["alone"] = out
# %%
objects = [rank, {"rank": rank}, None]
dist.broadcast_object_list(objects, src=1, group=turned)
out = [None]
dist.scatter_object_list(out, ["a", ["b"]], src=0, group=turned)
got = [None] * world
dist.all_gather_object(got, "x" * (1 + 1000 * rank), group=turned)
gathered = [None] * world if rank == 1 else None
dist.gather_object(rank, gathered, dst=1, group=turned)
result["turned"] = [objects, out, [len(g) for g in got], gathered]
# %%
dist.destroy_process_group()
