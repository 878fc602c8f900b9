"""Layers for what `keras.layers` has none."""

from keras_psplus.layers.dynamic_embedding import DynamicEmbedding

__all__ = ["DynamicEmbedding"]
