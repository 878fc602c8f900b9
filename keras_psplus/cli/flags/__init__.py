"""Flags and output that several commands share."""
