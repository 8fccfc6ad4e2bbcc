"""Worker groups of virtual devices, of local processes, and under torchrun."""
