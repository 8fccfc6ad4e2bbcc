"""The loss and the other results of a step, and means over the whole batch."""
