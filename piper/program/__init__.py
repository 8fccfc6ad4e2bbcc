"""A compiled program, its file and its checks."""
