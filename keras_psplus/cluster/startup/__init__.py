"""Checks before TensorFlow joins a cluster."""
