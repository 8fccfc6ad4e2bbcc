"""State that persists between steps: parameters, buffers, optimizer state, checkpoints."""
