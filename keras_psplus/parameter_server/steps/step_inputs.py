"""Arguments of a worker function: a batch as tensors, and the model's variables."""

from typing import Any

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import tree


def tensors(batch: Any) -> Any:
    """A batch as Keras's data adapters yield it, in tensors and without what is missing."""
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        return tf.convert_to_tensor(leaf)

    return tree.map_structure(convert, batch)


def weights(model: keras.Model) -> list[tf.Variable]:
    """TensorFlow's variables of a model's weights."""
    return [variable._value for variable in model.weights]
