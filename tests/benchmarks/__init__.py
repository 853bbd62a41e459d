"""Measures this project beside the floor and its peers: ``python -m tests.benchmarks``.

Nothing here asserts a time. Each row is measured in one run on one machine, in turns with what it
is compared with, and shown as a ratio: seconds alone say more about the machine than about us.
"""
