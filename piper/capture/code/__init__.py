"""The programs of chunks: what a worker runs, and how it is saved."""
