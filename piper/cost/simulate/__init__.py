"""Simulate a step on a cluster, real or imagined: plans run in simulated time."""
