"""Several copies of a pipeline: their weights and sums."""
