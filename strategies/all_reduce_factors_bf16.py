"""Synchronous data parallelism, gradients sent as their factors in bfloat16."""

import keras_psplus


def strategy(**options):
    """Kernels whose gradients are no such products go in bfloat16 as well."""
    return keras_psplus.MultiWorkerMirroredStrategy(compression="factors:bf16", **options)
