"""The vocabulary: passes, tensors, layouts, the DAG of a step and the plans of devices."""
