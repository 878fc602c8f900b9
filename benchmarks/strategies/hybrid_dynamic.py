"""Large embeddings on parameter servers, in tables that make rows for new ids."""

import keras_psplus

DYNAMIC_TABLES = True  # The lab's table is a `DynamicEmbedding`.


def strategy():
    """Float32, as the catalogue's `hybrid`."""
    return keras_psplus.HybridStrategy()
