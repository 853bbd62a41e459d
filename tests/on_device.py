"""Preloaded, this has ranks make tensors on their device unless a program says otherwise.

``torch.ones(3)`` is then on the accelerator that is the rank's current one. Ranks inherit this from
the process that they are forked from, so those that are started later have it, too.
"""

import torch

accelerator = torch.accelerator.current_accelerator()
assert accelerator is not None
torch.set_default_device(accelerator.type)
