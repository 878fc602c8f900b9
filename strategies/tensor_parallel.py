"""Tensor parallelism: all workers compute each layer together, each with a part of its weights."""

import keras_psplus


def strategy(**options):
    """Attention is cut by heads, embeddings by vocabulary, other kernels by columns."""
    return keras_psplus.ModelParallelStrategy(layout_map="auto", **options)
