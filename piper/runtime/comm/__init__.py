"""Ways to communicate: gloo, NCCL, and devices in one process."""
