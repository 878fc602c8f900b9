"""The model in stages, with two batches under way: gradients are one update old (PipeDream-2BW)."""

import keras_psplus


def strategy():
    """No stage waits for the end of a batch."""
    return keras_psplus.PipelineStrategy(microbatches=4, schedule="pipedream")
