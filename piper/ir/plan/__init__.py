"""One plan per rank equivalence class: instructions over slots, their text and their checks."""
