"""Pipeline schedules, one per file."""
