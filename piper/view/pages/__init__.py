"""Interactive pages: one HTML file each, no server."""
