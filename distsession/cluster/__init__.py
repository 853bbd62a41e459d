"""Starting ranks and talking to them.

Runs in: the kernel.
"""
