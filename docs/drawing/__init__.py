"""The drawing functions of `docs/make_pictures.py`."""
