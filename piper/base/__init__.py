"""Errors, units, records and their files: used by every room, about none."""
