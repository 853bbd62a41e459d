"""Sessions from scripts."""
