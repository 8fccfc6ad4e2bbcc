"""Where the first weights of a model come from."""
