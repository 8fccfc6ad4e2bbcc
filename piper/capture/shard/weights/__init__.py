"""The weights of sharded products: "column" and "row", and which is best for each."""
