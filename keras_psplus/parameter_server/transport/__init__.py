"""Reads from the servers and pushes to them, compressed or whole."""
