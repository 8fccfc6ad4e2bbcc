"""Runs plans: one executor a device, over any way to communicate. It knows no strategy."""
