"""A checkpoint is a folder of safetensors files and a JSON index. Each device writes its own file;
the index maps every slice of every named tensor to a file."""
