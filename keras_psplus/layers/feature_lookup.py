"""A dynamic table as one of KerasRS's."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_psplus.layers.dynamic_embedding import DynamicEmbedding


class FeatureLookup(keras.layers.Layer):
    """Looks a feature up as `keras_rs.layers.EmbedReduce` does.

    Args:
        table: `DynamicEmbedding` with a combiner, which one id of an example has no use for.
    """

    def __init__(self, table: DynamicEmbedding) -> None:
        super().__init__(name=table.name)
        self.table = table
        # Ids are no features, which Keras would cast.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.supports_jit = False

    def build(self, input_shape: Any = None) -> None:
        """Makes the table.

        Args:
            input_shape: Shape of the ids, whatever it is.
        """
        if not self.table.built:
            self.table.build(input_shape)
        self.built = True

    def call(self, ids: Any, weights: Any = None, training: bool | None = False) -> Any:
        """Looks rows up, and combines those of each example.

        Args:
            ids: Dense vector of ids, or dense, ragged or sparse matrix.
            weights: As for `DynamicEmbedding`.
            training: Whether a step trains with them.
        """
        if ids.shape.rank == 1:
            ids = tf.convert_to_tensor(ids)[:, tf.newaxis]
            weights = None if weights is None else tf.convert_to_tensor(weights)[:, tf.newaxis]
        return self.table(ids, weights, training=training)

    @property
    def embeddings(self) -> Any:
        """KerasRS's `get_embedding_tables` asks for a matrix, which there is none of.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"The rows of '{self.name}' have keys, and are no matrix. Read them of the table, a "
            f"DynamicEmbedding, by its `keys` and by calling it. Received: '{self.name}'"
        )
