"""A small GPT, trained on generated text: the program that a check puts through its faults.

It is written as for torchrun, with torch alone. The rows of a step follow from its number and the
rank, so that a step that is taken again is the same one.
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, LAYERS, CONTEXT, ROWS = 64, 4, 2, 32, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"
VICTIM = 1
"""The rank that is at fault."""


def text(length: int) -> str:
    """Sentences of made-up words, always the same."""
    chance = random.Random(7)
    words = ["".join(chance.choices(LETTERS[:26], k=chance.randint(2, 6))) for _ in range(30)]
    sentences = ""
    while len(sentences) < length:
        sentences += " ".join(chance.choices(words, k=chance.randint(3, 8))) + ".\n"
    return sentences


class Block(nn.Module):
    """Attention to what came before, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        later = torch.ones(length, length, device=x.device).triu(1).bool()
        found = scores.masked_fill(later, -1e9).softmax(-1) @ value
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Says which letter comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """A model, its optimizer, and how far it is.

    Args:
        kind: ``"ddp"`` or ``"fsdp"``.
        device: Where.

    Attributes:
        at: The step that comes next.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        torch.manual_seed(0)
        model: nn.Module = GPT().to(device)
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
        self.model, self.device, self.at = model, device, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.text = torch.tensor([LETTERS.index(letter) for letter in text(20_000)])
        # Before torch 2.13, FSDP2 does not go on after a step that was cut off.
        self.goes_on = kind == "ddp" or hasattr(model, "reset_iter_state")

    def rows(self) -> torch.Tensor:
        """Those of the step that comes next, for this rank."""
        chance = torch.Generator().manual_seed(1_000 * self.at + dist.get_rank())
        starts = torch.randint(len(self.text) - CONTEXT - 1, (ROWS,), generator=chance)
        rows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts])
        return rows.to(self.device)

    def step(self, fault: str = "") -> float:
        """Train once.

        Args:
            fault: What the victim does: ``"hang"``, or ``"mismatch"``.

        Returns:
            The loss of all ranks' rows.
        """
        if fault == "hang":
            dist.barrier()  # or a Stop would cut off ranks that are still at the step before
        fault = fault if dist.get_rank() == VICTIM else ""
        rows = self.rows()
        self.optimizer.zero_grad()
        if fault == "hang":
            time.sleep(600)
        found = self.model(rows[:, :-1])
        loss = F.cross_entropy(found.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        total = loss.detach().repeat(2 if fault == "mismatch" else 1)
        dist.all_reduce(total)
        value = total[0].item() / dist.get_world_size()  # the gradients are there from here on
        self.optimizer.step()
        self.at += 1
        return value

    def state(self) -> dict[str, Any]:
        """What a checkpoint has, whole on each rank."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return copy.deepcopy({"model": model, "optimizer": optimizer, "at": self.at})

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        self.at = state["at"]
