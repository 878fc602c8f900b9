"""Rows of keys in memory, and a Keras optimizer on them."""
