"""The trainer: steps, loops over batches, results."""
