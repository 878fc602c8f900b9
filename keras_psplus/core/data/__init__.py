"""Positions in datasets, and iterators."""
