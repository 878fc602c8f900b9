"""Large embeddings on parameter servers; rows travel in bfloat16 both ways."""

import keras_psplus


def strategy():
    """Dense gradients are float32."""
    return keras_psplus.HybridStrategy(row_compression="bf16", pull_compression="bf16")
