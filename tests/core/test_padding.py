import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.core.batch.batches import LastRow, padded

SPECS = {
    "dense": tf.TensorSpec([None, None]),
    "text": tf.TensorSpec([None], tf.string),
    "ragged": tf.RaggedTensorSpec([None, None, None], tf.int32, ragged_rank=2),
    "sparse": tf.SparseTensorSpec([None, 2]),
    "scalar": tf.TensorSpec([], tf.int32),
}


def batch(numbers, width=2):
    """All kinds of tensors that a batch can have, with a row for each number."""
    return {
        "dense": tf.tile(tf.reshape(tf.constant(numbers, tf.float32), [-1, 1]), [1, width]),
        "text": tf.strings.as_string(tf.constant(numbers, tf.int32)),
        "ragged": tf.ragged.constant([[[n]] for n in numbers], tf.int32, ragged_rank=2),
        "sparse": tf.sparse.from_dense(
            tf.tile(tf.reshape(tf.constant(numbers, tf.float32), [-1, 1]), [1, 2])
        ),
        "scalar": tf.constant(3),
    }


def lists(data):
    """The same in lists."""
    return {
        name: tf.sparse.to_dense(t).numpy().tolist()
        if isinstance(t, tf.SparseTensor)
        else t.numpy().tolist()
        if isinstance(t, tf.Tensor)
        else t.to_list()
        for name, t in data.items()
    }


def pad_with_zeros(data):
    assert padded((data["scalar"], None), tf.constant(0))[1] is None
    return padded(data, tf.shape(data["dense"])[0])


@pytest.fixture(params=["eager", "graph"])
def compiled(request):
    """Function of a function that is to run eagerly, or in a graph that knows no rows."""
    if request.param == "eager":
        return lambda function: function
    return tf.function(autograph=False, input_signature=[SPECS])


def test_a_batch_of_no_rows_gets_one_of_zeros(compiled):
    pad = compiled(pad_with_zeros)
    assert lists(pad(batch([]))) == {
        "dense": [[0.0, 0.0]],
        "text": [b""],
        "ragged": [[]],
        "sparse": [[0.0, 0.0]],
        "scalar": 3,
    }
    whole = batch([4, 5])
    assert lists(pad(whole)) == lists(whole)


def test_a_replica_that_has_run_out_goes_on_with_its_last_row(compiled):
    last_row = LastRow()

    @compiled
    def of_first_replica(data):
        return last_row.padded(data, tf.shape(data["dense"])[0], 0)

    @compiled
    def of_second_replica(data):
        return last_row.padded(data, tf.shape(data["dense"])[0], 1)

    # TensorFlow takes what it does not know of a shape as 0.
    first = lists(of_first_replica(batch([], width=0)))
    assert np.shape(first["dense"]) == (1, 1)
    for numbers, width in (([1, 2, 3], 4), ([8, 9], 3)):
        whole = batch(numbers, width)
        assert lists(of_first_replica(whole)) == lists(whole)
    for _ in range(2):
        found = lists(of_first_replica(batch([], width=0)))
        assert found["dense"] == [[9.0, 9.0, 9.0]]
        assert found["text"] == [b"9"]
        assert np.shape(found["sparse"]) == (1, 2) and len(found["ragged"]) == 1
    assert lists(of_second_replica(batch([], width=0)))["dense"] == [[0.0]]


def test_batches_of_known_size_stay_as_they_are_and_are_kept():
    last_row, data = LastRow(), tf.reshape(tf.range(6), [2, 3])
    assert last_row.padded(data, 2, 0) is data
    found = last_row.padded(tf.zeros([0, 0], tf.int32), tf.constant(0), 0)
    np.testing.assert_array_equal(found, [[3, 4, 5]])
