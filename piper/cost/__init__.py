"""Predict the time of a step on real or imagined devices: clusters, cost models, simulation."""
