"""Worker groups: of virtual devices, of worker processes, under torchrun."""
