"""Attaches to a kept session, and says how many milliseconds that took after the import."""

from __future__ import annotations

import sys
import time

from distsession import Session

began = time.perf_counter()
session = Session.attach(sys.argv[1])
took = 1e3 * (time.perf_counter() - began)
session.run(len, ())
session.detach()
sys.stdout.write(f"{took}\n")
