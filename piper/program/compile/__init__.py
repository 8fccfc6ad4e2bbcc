"""From a model and a strategy to a program."""
