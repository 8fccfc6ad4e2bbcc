"""The compiler's data types: passes, tensors, layouts, the DAG of a step and the device plans."""
