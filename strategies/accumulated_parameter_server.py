"""Asynchronous parameter servers, gradients of four batches sent and applied as one."""

import keras_psplus


def strategy(**options):
    """Sums gradients on each worker: a quarter of the updates and their bytes."""
    return keras_psplus.ParameterServerStrategy(
        updates=keras_psplus.updates.Accumulate(4), **options
    )
