"""One device as a worker drives it, and the interface of worker groups."""
