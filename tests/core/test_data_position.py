"""`fit` that goes on in a later epoch gets the very batches of one that was left alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.all_reduce.data.elements import SharedShuffle
from keras_psplus.all_reduce.data.sharding import of_one_replica
from keras_psplus.core import data_position
from keras_psplus.core import data_position as iterator_release
from keras_psplus.datasets import seed_shuffles
from keras_psplus.keras_internals.keras_parts import array_data_adapter, tf_trainer

ROWS, BATCH, EPOCHS = 16, 4, 4


class Rows:
    """Rows, and how often somebody began to read them."""

    def __init__(self):
        self.passes = 0

    def __call__(self):
        self.passes += 1
        yield from range(ROWS)

    @property
    def dataset(self):
        rows = tf.data.Dataset.from_generator(self, output_signature=tf.TensorSpec((), tf.int64))
        return rows.apply(tf.data.experimental.assert_cardinality(ROWS))


class Batches(keras.utils.PyDataset):
    """The same in batches."""

    def __init__(self, rows):
        super().__init__()
        self._rows, self.epochs = rows, 0

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        self._rows.passes += index == 0
        return np.arange(ROWS)[index * BATCH :][:BATCH] + 100 * self.epochs

    def on_epoch_end(self):
        self.epochs += 1


def of_arrays(rows):
    adapter = array_data_adapter.ArrayDataAdapter(np.arange(ROWS), batch_size=BATCH, shuffle=True)
    return of_one_replica(adapter, 3).map(lambda batch: batch[0])


def in_two_passes(rows):
    """Each element with one of another order."""
    data = rows.dataset.shuffle(ROWS)
    return tf.data.Dataset.zip((data, tf.data.Dataset.random(rerandomize_each_iteration=True)))


DATA = {
    "shuffled": lambda rows: rows.dataset.shuffle(ROWS).batch(BATCH),
    "shuffled by a seed": lambda rows: rows.dataset.shuffle(ROWS, seed=3).batch(BATCH).prefetch(2),
    "shuffled alike on all workers": lambda rows: seed_shuffles(
        tf.data.Dataset.range(ROWS).shuffle(ROWS).map(lambda row: row + 1).batch(BATCH), 5
    ),
    "of unknown length": lambda rows: (
        rows.dataset.filter(lambda _: True).shuffle(ROWS).batch(BATCH)
    ),
    "with random numbers": lambda rows: in_two_passes(rows).batch(BATCH),
    "arrays": of_arrays,
    "PyDataset": lambda rows: SharedShuffle(Batches(rows), 3),
    "distributed": lambda rows: tf.distribute.MirroredStrategy(
        ["CPU:0"]
    ).distribute_datasets_from_function(lambda _: rows.dataset.shuffle(ROWS, seed=3).batch(BATCH)),
}


@pytest.mark.parametrize("data", DATA)
def test_a_later_epoch_has_its_batches_and_earlier_ones_are_not_read(data):
    several = 2

    def begin():
        keras.utils.set_random_seed(1)
        rows = Rows()
        iterator = tf_trainer.TFEpochIterator(
            distribute_strategy=tf.distribute.get_strategy(),
            x=DATA[data](rows),
            steps_per_execution=several,
        )
        # As strategies do.
        iterator._distributed_dataset = iterator_release.ReleasedDataset(
            iterator._distributed_dataset
        )
        rows.passes = 0
        return iterator, rows

    def rest_of_epoch(iterator):
        found = []
        with iterator.catch_stop_iteration():
            for first, last, batches in iterator._epoch_iterator:
                for _ in range(first, last + 1):
                    batch = tf.nest.flatten(next(batches))
                    found.append([part.numpy().tolist() for part in batch])
        # Strategies do not take the first epoch's number of steps for that of all.
        iterator._num_batches = iterator.data_adapter.num_batches
        return found

    iterator, _ = begin()
    whole = [rest_of_epoch(iter(iterator)) for _ in range(EPOCHS)]
    assert len(whole[0]) == ROWS // BATCH and all(a != b for a, b in zip(whole, whole[1:]))

    iterator, rows = begin()
    data_position.skip(iter(iterator), EPOCHS - 2, several)
    assert rest_of_epoch(iterator) == whole[-2][several:]
    assert rest_of_epoch(iter(iterator)) == whole[-1]
    assert rows.passes <= 2
