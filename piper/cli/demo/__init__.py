"""``piper demo``, and a single-device reference run."""
