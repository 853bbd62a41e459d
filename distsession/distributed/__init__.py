"""Helpers for code that runs on ranks; no session is needed.

Runs in: an engine.
"""
