"""Synchronous data parallelism, gradients sent in float16."""

import keras_psplus


def strategy():
    """Beside DDP's hook of that name."""
    return keras_psplus.MultiWorkerMirroredStrategy(compression="fp16")
