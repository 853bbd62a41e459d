"""From cells to scripts."""
