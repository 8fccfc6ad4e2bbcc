"""The programs of chunks: how workers compile and run them, and how they are saved."""
