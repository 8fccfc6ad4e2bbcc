"""Checkpoints, exports and strategy switches of a running job."""
