"""What is written otherwise in a graph so that it can be sharded."""
