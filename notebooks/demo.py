"""Train a classifier of handwritten digits on several ranks, from a script.

The same job as in ``01_first_session.ipynb``, with the Python API. Exits with 0 only if the
classifier reads at least 95 % of the held-out digits and all ranks ended with the same weights.

``python notebooks/demo.py`` runs on four CPU ranks. ``--backend nccl`` puts each on a GPU.
"""

import argparse
import sys
import time

from distsession import Session

EPOCHS = 10
GOOD = 0.95


def train(epochs, lr):
    """Train on this rank's share; gives the accuracy and a checksum of the weights.

    ``rank``, ``world_size`` and ``device`` are variables of the rank. The script itself has no
    such names and never imports torch.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    train_x, test_x, train_y, test_y = load_digits_split()
    train_set = TensorDataset(train_x, train_y)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=0)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).to(device)
    on_gpu = device.type == "cuda"
    model = DistributedDataParallel(network, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total / len(loader)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1:2}  loss {mean.item() / world_size:.4f}")

    network.eval()
    with torch.no_grad():
        guessed = network(test_x[rank::world_size].to(device)).argmax(dim=1).cpu()
    right = (guessed == test_y[rank::world_size]).sum().to(device)
    dist.all_reduce(right)
    return right.item() / len(test_y), checksum(network)


def load_digits_split():
    """scikit-learn's digits: images and targets to train on, and a quarter held out."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    split = train_test_split(
        digits.images / 16, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in split)
    return train_x.float().unsqueeze(1), test_x.float().unsqueeze(1), train_y, test_y


def checksum(module):
    """A digest of the exact bytes of all parameters."""
    import hashlib

    parts = [parameter.detach().cpu().numpy().tobytes() for parameter in module.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", nargs="?", type=int, default=4)
    parser.add_argument("--backend", default="gloo")
    arguments = parser.parse_args()

    began = time.perf_counter()
    with Session(arguments.ranks, backend=arguments.backend, seed=0) as session:
        started = time.perf_counter() - began
        print(f"{session.world_size} ranks, backend {arguments.backend}")
        print(session.devices())
        print("\ntraining, each rank on its own share of the digits")
        results = session.run(train, EPOCHS, lr=3e-3)

    accuracy = results[0][0]
    checksums = {value[1] for value in results.values()}
    equal = len(checksums) == 1
    print(f"\nheld-out accuracy {accuracy:.1%}")
    print(f"weights {'equal' if equal else 'DIFFERENT'} on all ranks ({', '.join(checksums)})")
    print(
        f"seconds: {started:.1f} to start, {results.duration:.1f} to train and test, "
        f"{time.perf_counter() - began:.1f} in all"
    )
    return 0 if accuracy >= GOOD and equal else 1


if __name__ == "__main__":
    sys.exit(main())
