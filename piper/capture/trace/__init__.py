"""From a model, its loss and one example batch to one functional graph of ATen operations."""
