"""Compressors that send some of the values."""
