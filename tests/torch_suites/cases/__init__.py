"""Tests of ranks written after those of torch's repository that its wheel does not have."""
