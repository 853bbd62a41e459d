"""One rank under torchrun: joins the group and passes a barrier."""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print(f"READY {time.time()}\n", end="", flush=True)  # one write: the ranks share the pipe
dist.destroy_process_group()
