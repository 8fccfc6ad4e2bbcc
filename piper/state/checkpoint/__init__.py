"""A checkpoint is a folder: safetensors files that each device writes for itself, and an index in
JSON that says which slice of which named tensor lies in which of them."""
