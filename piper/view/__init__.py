"""What the other packages made, shown to a person. Nothing in the row imports this."""

from piper.view.tables import chunk_table, summary

__all__ = ["chunk_table", "summary"]
