"""Synchronous data parallelism; each worker keeps a share of weights and state (FSDP, ZeRO-3)."""

import keras_psplus


def strategy(**options):
    """Weights, slots and summed gradients in shares; layers gather theirs to compute."""
    return keras_psplus.MultiWorkerMirroredStrategy(shard="all", **options)
