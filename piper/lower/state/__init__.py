"""Buckets of parameters: reduced, updated and gathered."""
