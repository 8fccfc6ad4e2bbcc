"""Equal modules, such as the layers of a transformer, are traced once."""
