"""Cuts the exported graph into chunks, and each chunk into its passes."""
