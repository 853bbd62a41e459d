"""Lightning's Trainer with the ddp strategy."""

# %%
import os
import tempfile

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(0)


# %%
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = Model()
# %%
trainer = L.Trainer(
    accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=2,
    logger=False, enable_checkpointing=False, enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(),
)  # fmt: skip
trainer.fit(model, DataLoader(data, batch_size=4))
# %%
result = {
    "losses": model.losses, "world": trainer.world_size, "rank": trainer.global_rank,
    "loss": trainer.callback_metrics["loss"].item(), "weight": model.layer.weight.sum().item(),
}  # fmt: skip
# %%
import torch.distributed as dist

if dist.is_initialized():
    dist.destroy_process_group()
