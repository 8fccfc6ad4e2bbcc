"""Expert parallelism: the graph of a device that holds some of the experts."""
