"""One plan for each class of devices: instructions over slots, their text and their checks."""
