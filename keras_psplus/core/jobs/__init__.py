"""A job's control channel, failures and their reports."""
