"""The model in stages, one on each worker, with four micro-batches to a batch (1F1B)."""

import keras_psplus


def strategy():
    """Each stage keeps the activations of as many micro-batches as stages follow it, and one."""
    return keras_psplus.PipelineStrategy(microbatches=4)
