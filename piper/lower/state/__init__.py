"""Parameter buckets: their reductions, updates and gathers."""
