"""Starts the devices of a compiled program and gives a trainer that drives them."""
