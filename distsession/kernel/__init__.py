"""The kernel's half of each feature."""
