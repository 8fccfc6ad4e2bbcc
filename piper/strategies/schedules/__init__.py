"""Pipeline schedules, one a file."""
