"""Large embeddings on parameter servers, in tables that grow; rows travel as bytes both ways."""

import keras_psplus

DYNAMIC_TABLES = True  # The lab's table is a `DynamicEmbedding`.


def strategy():
    """Dense gradients are float32."""
    return keras_psplus.HybridStrategy(row_compression="int8", pull_compression="int8")
