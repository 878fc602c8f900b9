"""Collective operations of TensorFlow and the order in which they start."""
