"""Large embeddings on parameter servers, by rows; everything else all-reduced."""

import keras_psplus


def strategy(**options):
    """Synchronous; tables of a megabyte and more lie on the servers."""
    return keras_psplus.HybridStrategy(**options)
