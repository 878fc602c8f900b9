"""Synchronous parameter servers: all workers take each step together, as one process would."""

import keras_psplus


def strategy(**options):
    """Splits the batch over the workers; the ps tasks apply the mean gradient."""
    return keras_psplus.ParameterServerStrategy(mode="sync", **options)
