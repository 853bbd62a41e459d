"""From cells to scripts, and scripts as jobs.

Runs in: both.
"""
