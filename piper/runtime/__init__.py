"""Runs plans: one executor per device, over any transport. It is independent of the strategy."""
