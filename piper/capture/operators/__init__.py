"""Piper's own operators, and operators by the names that files have for them."""
