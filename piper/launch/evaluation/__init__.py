"""Evaluation of data sets."""
