"""Functions of torch and transformers that are intercepted or rewritten when a model is traced."""
