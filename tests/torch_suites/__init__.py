"""torch's own multi-rank tests, on a session's ranks and in plain processes, compared.

``python -m tests.torch_suites`` (``make soak``) runs all of them. ``--only NAME`` takes the methods
that contain it, ``--suite NAME`` one suite; ``--list`` shows what there is.
"""
