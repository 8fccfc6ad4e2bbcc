"""Binds each kind of instruction to a function without arguments."""
