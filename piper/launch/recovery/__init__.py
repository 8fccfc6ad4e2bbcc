"""Faults of workers from which a run recovers."""
