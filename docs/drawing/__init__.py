"""What `docs/make_pictures.py` draws with."""
