"""Initial weights of a model: from memory, from ``init`` functions, or from files."""
