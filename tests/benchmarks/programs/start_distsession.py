"""A fresh process that starts a session and passes a barrier. Arguments: ranks."""

import sys
import time

from distsession import Session

with Session(int(sys.argv[1])) as session:
    session.run(lambda: dist.barrier())  # noqa: F821  the ranks have it
    print("READY", time.time(), flush=True)
