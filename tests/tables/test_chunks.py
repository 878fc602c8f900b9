"""Rows that get memory as they come."""

import numpy as np
import tensorflow as tf

from keras_psplus.tables import chunks

SHAPE = 1 << 14, 4


def test_rows_stay_while_they_get_more_memory(monkeypatch):
    monkeypatch.setattr(chunks, "_FIRST_BYTES", 1 << 18)
    monkeypatch.setattr(chunks, "_LEAST_ROWS", 16)
    monkeypatch.setattr(chunks, "MOST_ROWS", 1 << 16)
    rows, values = (
        chunks.ChunkedRows(SHAPE[1], tf.float32),
        np.random.default_rng(0).random((SHAPE[0] + 1, SHAPE[1])),
    )

    @tf.function(autograph=False)
    def add(first, values):
        end = first + tf.shape(values)[0]
        rows.allocate(end)
        return rows.write(tf.range(first, end), values)

    def memory():
        return [len(one.numpy()) for one in rows._chunks[: int(rows._used)]]

    sizes, first = [], 0
    # One of them is for more than what comes next.
    for end in (1, 200, 256, 257, 1000, 1025, 5000, SHAPE[0], SHAPE[0] + 1):
        add(tf.constant(first), tf.constant(values[first:end], tf.float32))
        np.testing.assert_array_equal(
            rows.sparse_read(tf.range(end)), values[:end].astype(np.float32)
        )
        sizes.append(memory())
        first = end
    # A small one, which is replaced until it is as large as the first chunk is to be.
    assert sizes[0] == sizes[2] == [256] and sizes[4] == [0, 2048]
    assert sizes[6] == [0, 0, 16384] and sizes[8] == [0, 0, 16384, 16384]
    assert len(rows._ends) > len(sizes[-1])
