"""What other packages made, shown to a person. Nothing here changes what is done."""

from piper.program.chunk_table import chunk_table, summary

__all__ = ["chunk_table", "summary"]
