"""Transports: gloo, NCCL, and loopback between devices in one process."""
