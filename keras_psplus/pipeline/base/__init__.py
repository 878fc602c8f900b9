"""Stages, micro-batches, rows and schedules: what has no graph."""
