"""Piper's own operators, and the lookup of operators by their names in files."""
