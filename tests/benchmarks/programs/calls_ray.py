"""Calls of Ray actors, measured whenever a line comes in. Arguments: actors, a folder.

A line holds a number of calls; the answer is a line with the milliseconds of each, as JSON.
"""

import json
import sys
import time

import ray


def noop() -> None:
    return None


@ray.remote(num_cpus=0)
class Actor:
    def run(self, function, args, kwargs):
        return function(*args, **kwargs)


def main(count: int, folder: str) -> None:
    ray.init(
        num_cpus=count,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        object_store_memory=100 << 20,
    )
    actors = [Actor.remote() for _ in range(count)]

    def call() -> None:
        ray.get([actor.run.remote(noop, (), {}) for actor in actors])

    call()
    print("[]", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
        print(json.dumps(times), flush=True)
    ray.shutdown()


main(int(sys.argv[1]), sys.argv[2])
