"""Programs compiled before, in a folder of the user."""
