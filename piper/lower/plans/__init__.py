"""Turns an ordered DAG into plans: issue order, slots, memory and traffic."""
