"""The speed of matrix products by shape, and how ``piper measure`` finds it and other figures."""
