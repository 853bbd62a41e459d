"""Debugging aids: the debug level, the backend, and a trace of what was called."""

# %%
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
# %%
for size in (1, 10, 100):
    dist.all_reduce(torch.ones(size))
tensor = torch.ones(4)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
names = {event.key for event in profile.key_averages()}
result = {
    "backend": dist.get_backend(), "level": dist.get_debug_level().name,
    "traced": [any(name in each for each in names) for name in ("all_reduce", "broadcast")],
    "sum": tensor.sum().item(),
}  # fmt: skip
# %%
dist.destroy_process_group()
