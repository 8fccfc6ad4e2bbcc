"""Tensor and context parallelism: the graph of one device along an axis."""
