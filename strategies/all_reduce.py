"""Synchronous data parallelism: float32 gradients, one all-reduce for every step."""

import keras_psplus


def strategy(**options):
    """Variables mirrored on all workers, gradients summed over them at every step."""
    return keras_psplus.MultiWorkerMirroredStrategy(**options)
