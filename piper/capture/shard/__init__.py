"""Tensor and context parallelism: the graph of one device of an axis."""
