"""Synchronous data parallelism, one bit for each element of gradients."""

import keras_psplus


def strategy():
    """A thirtieth of the bytes, with error feedback."""
    return keras_psplus.MultiWorkerMirroredStrategy(compression="sign")
