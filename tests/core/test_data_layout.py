"""The layout of data in a backup, for every kind of data that `fit` takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import epoch_iterator

from keras_psplus.core import data_position

ROWS, BATCH = 10, 4
X = np.ones((ROWS, 2), "float32")


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * BATCH :][:BATCH]


def generator():
    for i in range(3):
        yield (X[i * BATCH :][:BATCH],)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda: {"x": X, "batch_size": BATCH}, (3, BATCH, 2, None)),
        (lambda: {"x": tf.data.Dataset.from_tensor_slices(X).batch(BATCH)}, (3, None, None, None)),
        (lambda: {"x": Batches()}, (3, None, None, None)),
        (lambda: {"x": generator(), "steps_per_epoch": 3}, (None, None, None, 3)),
    ],
    ids=["arrays", "dataset", "PyDataset", "generator"],
)
def test_layout(data, expected):
    iterator = epoch_iterator.EpochIterator(**data())
    found = data_position.layout_of(iterator)
    assert tuple(found.values()) == expected
    # The same data resume; nothing is to be said.
    data_position.check(iterator, found, 1, 2)
