"""Communication hooks of DDP: compressed to 16 bits, PowerSGD, and one of one's own."""

# %%
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")


# %%
def mean_hook(state, bucket):
    tensor = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def gradients(register):
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)))
    register(model)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(8, 32)).square().sum().backward()
    return sum(parameter.grad.sum().item() for parameter in model.parameters())


state = powerSGD_hook.PowerSGDState(
    process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
)
result = {
    "none": gradients(lambda model: None),
    "own": gradients(lambda model: model.register_comm_hook(None, mean_hook)),
    "half": gradients(
        lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ),
    "power": gradients(lambda model: model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)),
}
assert abs(result["none"] - result["own"]) < 1e-3
# %%
dist.destroy_process_group()
