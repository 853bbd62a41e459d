"""The process group of a session, and what is recorded of each collective."""
