"""Synchronous data parallelism, the largest hundredth of each gradient (top-k)."""

import keras_psplus


def strategy(**options):
    """For slow links and few workers: every worker gets what all others send."""
    return keras_psplus.MultiWorkerMirroredStrategy(compression="topk:0.01", **options)
