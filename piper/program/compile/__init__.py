"""Compiles a model and a strategy to a program."""
