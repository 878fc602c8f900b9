"""Datasets: read by the chief, or by each worker for itself."""
