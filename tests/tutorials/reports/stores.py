"""Stores by hand: pytorch/pytorch#53840 (wait), pytorch/pytorch#67972 (a store of one's own)."""

# %%
import tempfile
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
result = {}
# %%
port = [None]
if rank == 0:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = [server.port]
dist.broadcast_object_list(port)
store = server if rank == 0 else dist.TCPStore("127.0.0.1", port[0], is_master=False)
store.set(f"rank {rank}", str(rank))
store.wait([f"rank {r}" for r in range(world)], timedelta(seconds=20))
result["values"] = [store.get(f"rank {r}").decode() for r in range(world)]
dist.barrier()
# %%
try:
    store.wait([f"rank {rank}", "never"], timedelta(seconds=0.1))
except dist.DistStoreError as error:
    result["wait"] = [type(error).__name__, "never" in str(error), "timeout" in str(error)]
result["sum"] = store.add("count", rank + 1) > 0
dist.barrier()
result["count"] = store.add("count", 0)
result["swapped"] = store.compare_set(f"mine {rank}", "", "first").decode()
result["kept"] = store.compare_set(f"mine {rank}", "second", "third").decode()
result["deleted"] = [store.delete_key(f"mine {rank}"), store.check([f"mine {rank}"])]
# %%
name = [tempfile.mktemp()] if rank == 0 else [None]
dist.broadcast_object_list(name)
for kind, made in {
    "prefix": dist.PrefixStore("a/b", store),
    "file": dist.FileStore(name[0], world),
    "hash": dist.HashStore(),
}.items():
    made.set("key", "value")
    made.multi_set(["one", "two"], ["1", "2"]) if kind != "file" else None
    result[kind] = [made.get("key").decode(), made.add("n", 0), repr(made.has_extended_api())]
dist.barrier()
# %%
dist.destroy_process_group()
