"""Large embeddings on parameter servers; the next batch's rows are read ahead."""

import keras_psplus


def strategy():
    """Float32, as the catalogue's `hybrid`."""
    return keras_psplus.HybridStrategy(prefetch=True)
