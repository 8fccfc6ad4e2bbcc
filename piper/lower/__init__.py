"""Lowers a placed and ordered DAG to one verified plan per rank equivalence class."""
