"""Tokens to the ranks of their experts and back, with uneven splits: pytorch/torchtitan#989."""

# %%
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
tokens = torch.randn(6, 4, requires_grad=True)
expert = nn.Linear(4, 4)
nn.init.constant_(expert.weight, 0.1 * (rank + 1))
nn.init.zeros_(expert.bias)
# %%
chosen = torch.tensor([0, 1, 1, 0, 1, 1]) if rank else torch.tensor([0, 0, 0, 1, 0, 0])
order = chosen.argsort(stable=True)
send = torch.bincount(chosen, minlength=world)
receive = torch.empty_like(send)
dist.all_to_all_single(receive, send)
there = functional.all_to_all_single_autograd(
    tokens[order], receive.tolist(), send.tolist(), dist.group.WORLD
)
back = functional.all_to_all_single_autograd(
    expert(there), send.tolist(), receive.tolist(), dist.group.WORLD
)
out = torch.empty_like(tokens).index_copy(0, order, back)
(out**2).sum().backward()
result = {
    "counts": [send.tolist(), receive.tolist()],
    "out": out.tolist(),
    "tokens": tokens.grad.tolist(),
    "expert": expert.weight.grad.tolist(),
}
# %%
dist.destroy_process_group()
