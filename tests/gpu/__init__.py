"""Reads off traced steps how they would run on GPUs, without a GPU."""
