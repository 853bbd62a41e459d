"""Accelerate's notebook_launcher: with one process it runs the function in each rank."""

# %%
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.state import AcceleratorState

AcceleratorState._reset_state(reset_partial_state=True)  # it refuses where another one was made
found = {}


# %%
def train(scale):
    accelerator = Accelerator(cpu=True)
    gathered = accelerator.gather(torch.ones(1) * accelerator.process_index * scale)
    found.update(processes=accelerator.num_processes, gathered=gathered.tolist())


# %%
notebook_launcher(train, (3,), num_processes=1)
# %%
result = found
