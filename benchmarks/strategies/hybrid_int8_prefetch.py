"""Large embeddings on parameter servers; rows as bytes, the next batch's read ahead."""

import keras_psplus


def strategy():
    """Dense gradients are float32."""
    return keras_psplus.HybridStrategy(
        row_compression="int8", pull_compression="int8", prefetch=True
    )
