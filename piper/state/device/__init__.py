"""The state of one device: flat buffers, their slices, and how they travel."""
