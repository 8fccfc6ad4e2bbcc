"""What lasts between steps: parameters, optimizer state, checkpoints."""
