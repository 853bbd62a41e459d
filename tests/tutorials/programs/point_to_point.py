"""Send, receive, and a ring of messages."""

# %%
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
# %%
tensor = torch.zeros(1)
if rank == 0:
    tensor += 1
    dist.send(tensor, dst=1)
else:
    dist.recv(tensor, src=0)
blocking = tensor.item()
# %%
received = torch.zeros(3)
requests = [
    dist.isend(torch.full((3,), float(rank)), dst=(rank + 1) % world),
    dist.irecv(received, src=(rank - 1) % world),
]
for request in requests:
    request.wait()
# %%
total, outgoing = torch.tensor([rank + 1.0]), torch.tensor([rank + 1.0])
for _ in range(world - 1):  # every rank hands on what it got last
    incoming = torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % world),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    total += incoming
    outgoing = incoming
result = {"blocking": blocking, "received": received.tolist(), "total": total.item()}
# %%
dist.destroy_process_group()
