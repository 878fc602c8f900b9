"""Measurement of a model for `keras-psplus plan`."""
