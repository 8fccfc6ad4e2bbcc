"""The training DAG: nodes, values, what is known of the model, filters and checks."""
