"""Stale-synchronous parameter servers: no worker is more than three steps ahead of another."""

import keras_psplus


def strategy(**options):
    """Asynchronous steps with a bound on the staleness of the weights they read."""
    return keras_psplus.ParameterServerStrategy(max_staleness=3, **options)
