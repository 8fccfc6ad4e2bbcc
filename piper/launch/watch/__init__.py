"""Liveness of devices, interrupts, and measured times."""
