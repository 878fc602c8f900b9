"""Datasets: the rows of a global batch that each replica gets."""
