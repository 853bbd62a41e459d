"""Where the helpers differ from the libraries that they stand for, seen on ranks.

Each check is marked with what it shows: sentences of docs/distributed.md. That none is left out is
seen in ``tests/unit/test_distributed_tables.py``. They run as those of ``distributed_checks.py``
do, in step, on any number of ranks.
"""

from __future__ import annotations

from tests.integration import distributed_places, distributed_values
from tests.integration.distributed_marks import CHECKS, SHOWN

__all__ = ["CHECKS", "SHOWN", "distributed_places", "distributed_values"]
