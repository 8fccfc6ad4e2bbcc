"""Commands that run nothing: they predict, compare and choose."""
