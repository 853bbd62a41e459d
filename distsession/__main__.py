"""``python -m distsession``."""

from __future__ import annotations

import sys

from distsession.cli import main

sys.exit(main())
