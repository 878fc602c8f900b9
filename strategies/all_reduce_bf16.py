"""Synchronous data parallelism, gradients sent in bfloat16: half the bytes."""

import keras_psplus


def strategy(**options):
    """Gradients lose all but 8 bits of precision, which training rarely notices."""
    return keras_psplus.MultiWorkerMirroredStrategy(compression="bf16", **options)
