"""Logical streams on a GPU: CUDA streams and events, SM shares, timings."""
