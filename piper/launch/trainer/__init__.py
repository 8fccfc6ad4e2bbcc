"""The trainer: steps, training loops and their results."""
