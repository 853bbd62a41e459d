"""What runs in an agent or on a rank.

Runs in: an engine.
"""
