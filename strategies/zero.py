"""Synchronous data parallelism; each worker keeps a share of the optimizer's state (ZeRO)."""

import keras_psplus


def strategy(**options):
    """Slots and summed gradients in shares, weights whole on all workers."""
    return keras_psplus.MultiWorkerMirroredStrategy(shard="optimizer", **options)
