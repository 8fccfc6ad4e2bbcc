"""Functions of torch that are replaced while a model is traced."""
