"""Callbacks that log what steps and evaluations give."""
