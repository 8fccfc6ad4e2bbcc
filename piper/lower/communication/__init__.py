"""Transfers and collectives of activations, gradients and scalars."""
