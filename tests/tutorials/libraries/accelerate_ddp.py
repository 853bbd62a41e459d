"""Accelerate: prepare, accumulate, gather_for_metrics, end_training."""

# %%
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
# %%
x = torch.randn(66, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=8, shuffle=True)
)
# %%
for _epoch in range(2):
    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
# %%
right = []
model.eval()
for batch, target in loader:
    with torch.no_grad():
        predicted = model(batch).argmax(1)
    predicted, target = accelerator.gather_for_metrics((predicted, target))
    right += (predicted == target).tolist()
weight = accelerator.unwrap_model(model).weight.sum().item()
result = {
    "seen": len(right), "right": sum(right), "weight": weight,
    "processes": accelerator.num_processes, "rank": accelerator.process_index,
}  # fmt: skip
# %%
accelerator.wait_for_everyone()
accelerator.end_training()
