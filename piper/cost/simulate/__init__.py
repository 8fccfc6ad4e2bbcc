"""A step on a cluster that need not exist: plans run in simulated time."""
