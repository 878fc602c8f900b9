"""The model in stages, one on each worker, with four micro-batches to a batch (GPipe)."""

import keras_psplus


def strategy():
    """Stages are cut by floating-point operations."""
    return keras_psplus.PipelineStrategy(microbatches=4)
