"""Large embeddings on parameter servers; rows travel as bytes both ways."""

import keras_psplus


def strategy():
    """Dense gradients are float32."""
    return keras_psplus.HybridStrategy(row_compression="int8", pull_compression="int8")
