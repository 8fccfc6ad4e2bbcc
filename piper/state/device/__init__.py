"""The state of one device: flat buffers, their slices, and their transfer to files and devices."""
