"""A stand-in for NCCL and its device, without a GPU."""
