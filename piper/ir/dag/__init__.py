"""The training DAG: nodes, values, model facts, filters and checks."""
