"""torch's own multi-rank tests, on a session's ranks and in plain processes, compared.

``python -m tests.torch_suites`` (``make soak``) runs all of them. It fails if a method fails on
ranks that passes in plain processes, unless ``exceptions.py`` lists it, and if a session cannot be
used after a method. ``--suite NAME`` takes one suite, ``--only NAME`` the methods whose names
contain it; ``--list`` shows what there is.
"""
