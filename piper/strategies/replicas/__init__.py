"""The data-parallel replicas of a strategy: lost ones, and those of unequal speed."""
