"""Strategies by name, which `keras_psplus.strategy_from_env()` makes."""
