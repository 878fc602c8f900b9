"""Results, restarts and flags of a job that the launcher has started."""
