"""Starts the devices of a compiled program and returns a trainer that drives them."""
