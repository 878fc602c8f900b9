"""Synchronous parameter servers: all workers take each step together, as one process would."""

import keras_psplus


def strategy(**options):
    """The batch is split over the workers, and the ps tasks apply the mean of their gradients."""
    return keras_psplus.ParameterServerStrategy(mode="sync", **options)
