"""A job's progress, records and stalls, for people and programs."""
