"""Checkpoints, exports and switches of a running job."""
