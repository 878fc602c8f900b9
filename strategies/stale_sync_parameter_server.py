"""Stale-synchronous parameter servers: no worker is more than three steps ahead of another."""

import keras_psplus


def strategy(**options):
    """As asynchronous ones, but for a bound on how old the weights can be that a step reads."""
    return keras_psplus.ParameterServerStrategy(max_staleness=3, **options)
