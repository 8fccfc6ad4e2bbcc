"""Whether devices go on, and what they took."""
