"""Instructions of a plan as functions of no arguments."""
