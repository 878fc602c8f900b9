"""Parts of tensors, and their gradients; numbers of rows that only a step knows."""

import numpy as np
import tensorflow as tf

from keras_psplus.all_reduce.collectives import instance_keys
from keras_psplus.sharding.places import AxisCut, Place
from keras_psplus.tensor_parallel.group import ModelGroup
from tests.support.tables import for_each


@for_each("shape", [(5, 3), (17, 4, 3), (0, 3)])
@for_each("unknown", [1, 2])
def test_padding(shape, unknown):
    spec = tf.TensorSpec([None] * unknown + list(shape[unknown:]))

    @tf.function(input_signature=[spec], autograph=False)
    def padded_and_back(tensor):
        padded, rows, _ = instance_keys.padded_rows(tensor)
        assert padded.shape[1:].is_fully_defined()
        back = instance_keys.without_padding(padded, rows, tensor)
        assert back.shape.as_list() == tensor.shape.as_list()
        return padded, back

    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    padded, back = padded_and_back(value)
    np.testing.assert_array_equal(back, value)
    leading = int(np.prod(shape[:unknown]))
    assert padded.shape[0] == instance_keys.padded_size(leading) >= leading


def test_parts_along_an_axis():
    value = tf.reshape(tf.range(24.0), [2, 6, 2])
    cut = AxisCut(value.shape, 1, 3)
    assert (cut.shard, cut.width) == ((2, 2, 2), 8)
    place = Place(cut)
    parts = [place.local_part(value, rank) for rank in range(3)]
    np.testing.assert_array_equal(parts[1], value[:, 2:4])
    rows = tf.stack([tf.reshape(part, [8]) for part in parts])
    np.testing.assert_array_equal(cut.whole(rows), value)


class Tripled:
    """Collectives of two workers, of which the other has three times as much."""

    gather_equal = staticmethod(lambda tensor: tf.stack([tensor, 3 * tensor]))


@for_each(
    "name, arguments, value, gradient",
    [
        ("enter", (), [[1, 2]], [[4, 4]]),
        ("sum", (), [[4, 8]], [[1, 1]]),
        ("collect", (1,), [[1, 2, 3, 6]], [[1, 1]]),
    ],
)
def test_collectives_have_the_gradients_of_their_sums(name, arguments, value, gradient):
    given = tf.constant([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        tape.watch(given)
        found = getattr(ModelGroup(Tripled(), 0, 2), name)(given, *arguments)
    np.testing.assert_array_equal(found, value)
    np.testing.assert_array_equal(tape.gradient(found, given), gradient)
