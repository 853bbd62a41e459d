"""IPython's front end: magics and live output.

Runs in: the kernel.
"""
