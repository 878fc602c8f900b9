"""Versions of tables in a folder, for processes that serve."""
