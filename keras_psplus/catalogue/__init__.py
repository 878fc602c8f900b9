"""Strategies by name, which `keras_psplus.strategy()` makes."""
