"""Optimizers: how Piper makes them, what they require, and when they step."""
