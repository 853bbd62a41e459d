"""What can only be tried on a GPU, as a report and as tests: ``python -m tests.gpu``."""
