"""From a model with named regions to chunks whose passes are pure functions."""
