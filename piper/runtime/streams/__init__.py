"""Logical streams on a GPU: events, shares of its SMs, timings."""
