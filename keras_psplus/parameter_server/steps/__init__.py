"""Asynchronous steps, with the staleness that they may have."""
