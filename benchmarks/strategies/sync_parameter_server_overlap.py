"""Synchronous parameter servers whose workers read for the next step while they send this one."""

import keras_psplus


def strategy(**options):
    """Each variable is updated and read as soon as its gradients are there; exact."""
    return keras_psplus.ParameterServerStrategy(mode="sync", overlap_steps=True, **options)
