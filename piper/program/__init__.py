"""Compiled programs: compilation, files and checks."""
