"""Asynchronous parameter servers: every worker's step reads and updates without waiting."""

import keras_psplus


def strategy(**options):
    """Variables on the ps tasks, steps sent to the workers by the chief."""
    return keras_psplus.ParameterServerStrategy(**options)
