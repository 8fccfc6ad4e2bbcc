"""Optimizers: how they are made, what they need, and when they step."""
