"""The best speed-up possible, before accuracy is paid."""

import tensorflow as tf

from keras_psplus.compression.base import Compressor


class NoCommunication(Compressor):
    """Sends nothing: shows how fast training were if communication cost no time at all.

    Each worker trains a model of its own on its share of the data, so its results are of no use.
    `communicates` is False, and `mean` gives a worker its own gradient back; where gradients are
    pushed to a server, `decode` gives zeros, and the variables stay what they are.

    Example:

    >>> keras_psplus.compression.NoCommunication().wire_bytes([1000, 1000], "float32")
    0
    """

    reducible = True
    communicates = False

    def encode(self, tensor, state, step):
        return (), state

    def decode(self, payload, shape, dtype, step):
        return tf.zeros(shape, dtype)

    def wire_bytes(self, shape, dtype, step=None):
        return 0

    def encode_rows(self, values, step):
        return ()

    def decode_rows(self, payload, row_shape, dtype, step):
        return tf.zeros([0, *row_shape], dtype)

    def row_bytes(self, row_shape, dtype, step=None):
        return 0

    def rounds(self, tensor, state, step):
        yield []
        return tensor, tensor, state
