"""Data to Ray actors and back, measured whenever a line comes in. Arguments: actors, a folder.

A line holds ``send`` or ``bring``, ``torch`` or ``numpy``, and a number of bytes. The answer is a
line with the milliseconds of one transfer, as JSON. The receiver's first touch is part of it.
"""

import json
import sys
import time

import numpy as np
import ray
import torch

PAGE = 1024  # float32 elements


@ray.remote(num_cpus=0)
class Actor:
    def touch(self, value):
        return float(value[::PAGE].sum())

    def make(self, kind, count):
        self.value = torch.ones(count) if kind == "torch" else np.ones(count, dtype=np.float32)

    def give(self):
        return self.value


def main(count: int, folder: str) -> None:
    ray.init(
        num_cpus=count,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        object_store_memory=10 << 30,
    )
    actors = [Actor.remote() for _ in range(count)]
    made: dict[str, object] = {}

    def send(value) -> None:
        reference = ray.put(value)
        ray.get([actor.touch.remote(reference) for actor in actors])

    def bring() -> None:
        for value in ray.get([actor.give.remote() for actor in actors]):
            float(value[::PAGE].sum())

    ray.get([actor.make.remote("numpy", 10) for actor in actors])
    print("[]", flush=True)
    for line in sys.stdin:
        what, kind, size = line.split()
        if line not in made:
            made.clear()
            elements = int(size) // 4
            made[line] = (
                torch.ones(elements) if kind == "torch" else np.ones(elements, dtype=np.float32)
            )
            if what == "bring":
                ray.get([actor.make.remote(kind, elements) for actor in actors])
        began = time.perf_counter()
        send(made[line]) if what == "send" else bring()
        print(json.dumps([1e3 * (time.perf_counter() - began)]), flush=True)
    ray.shutdown()


main(int(sys.argv[1]), sys.argv[2])
