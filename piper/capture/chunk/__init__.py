"""From one graph to chunks, each cut into its passes."""
