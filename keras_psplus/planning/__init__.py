"""Bytes, memory and floors of each entry, by arithmetic alone.

Nothing here imports TensorFlow.
"""
