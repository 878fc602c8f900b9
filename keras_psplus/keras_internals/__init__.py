"""Attributes and modules of Keras that are not public, each named in one place."""
