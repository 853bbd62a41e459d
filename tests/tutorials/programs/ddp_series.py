"""A Trainer class, a DistributedSampler, snapshots that a later run goes on from."""

# %%
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
# %%
parser = argparse.ArgumentParser()
parser.add_argument("--total_epochs", type=int, default=4)
parser.add_argument("--save_every", type=int, default=2)
parser.add_argument("--batch_size", default=8, type=int)
arguments = parser.parse_args()


# %%
class Trainer:
    def __init__(self, model, data, optimizer, save_every, path):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.data, self.optimizer, self.save_every, self.path = data, optimizer, save_every, path
        self.epochs_run, self.losses = 0, []
        self.plain = model
        if os.path.exists(path):
            snapshot = torch.load(path, weights_only=True)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.data.sampler.set_epoch(epoch)
            self.losses.append(sum(self._run_batch(*batch) for batch in self.data))
            if self.rank == 0 and epoch % self.save_every == self.save_every - 1:
                state = {"MODEL_STATE": self.plain.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.path)


# %%
torch.manual_seed(0)
data = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
path = [os.path.join(tempfile.mkdtemp(), "snapshot.pt") if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(path, src=0)


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    loader = DataLoader(
        data, batch_size=arguments.batch_size, shuffle=False, sampler=DistributedSampler(data)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Trainer(model, loader, optimizer, arguments.save_every, path[0])


first = make()
first.train(arguments.total_epochs - 1)  # it is interrupted before the end
# %%
dist.barrier()
second = make()
second.train(arguments.total_epochs)
result = {
    "first": first.losses, "second": second.losses, "went_on_from": second.epochs_run,
    "weight": second.plain.weight.sum().item(),
}  # fmt: skip
# %%
dist.destroy_process_group()
