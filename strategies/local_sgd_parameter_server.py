"""Asynchronous parameter servers whose workers take eight steps alone between two messages."""

import keras_psplus


def strategy(**options):
    """Workers read the variables, step on copies of them, and send what these have changed."""
    return keras_psplus.ParameterServerStrategy(updates=keras_psplus.updates.LocalSGD(8), **options)
