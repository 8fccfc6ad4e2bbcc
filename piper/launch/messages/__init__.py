"""What goes between a trainer and worker processes."""
