"""Metrics that are computed over all ranks."""

# %%
import torch
import torch.distributed as dist
import torchmetrics

dist.init_process_group("gloo")
rank = dist.get_rank()
# %%
torch.manual_seed(rank)
accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")
error = torchmetrics.MeanSquaredError()
curve = torchmetrics.CatMetric()
for step in range(3 + rank):  # uneven
    accuracy.update(torch.randn(8, 3), torch.randint(0, 3, (8,)))
    error.update(torch.randn(8), torch.zeros(8))
    curve.update(torch.tensor(float(step)))
result = {
    "accuracy": accuracy.compute().item(), "error": error.compute().item(),
    "curve": sorted(curve.compute().tolist()),
}  # fmt: skip
# %%
dist.destroy_process_group()
