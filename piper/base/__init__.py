"""Errors, units, JSON records and files. Every package uses these; they import no other one."""
