"""Worker groups: virtual devices, processes, torchrun."""
