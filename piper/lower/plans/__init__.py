"""From an ordered DAG to plans: issue order, slots, memory, traffic."""
