"""Pages to explore: one HTML file each, which needs no server."""
