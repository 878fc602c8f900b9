"""Several copies of a pipeline: their sums and residuals."""
