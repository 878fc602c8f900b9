"""Results and restarts of a job that the launcher has started."""
