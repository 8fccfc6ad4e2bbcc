"""Rewrites of operations so that they can be sharded."""
