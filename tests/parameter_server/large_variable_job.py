"""Trains, saves and loads a table of 2.5 GB on one parameter server.

large_variable_job.py FOLDER
"""

import pathlib
import sys

import h5py
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

ROWS, DIM = 4_900_000, 128
# In every shard of at most 1 GiB.
IDS = np.array([0, 1_000_000, 2_450_000, 3_900_000, ROWS - 1], "int32")


def main():
    folder = pathlib.Path(sys.argv[1])
    strategy = psp.ParameterServerStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        table = keras.layers.Embedding(ROWS, DIM)
        model = keras.Sequential([keras.Input((1,), dtype="int32"), table])
        model.compile("sgd", "mse")
    variable = table.embeddings.value
    sizes = [4 * shard.shape.num_elements() for shard in variable.shards]
    assert sum(sizes) == 4 * ROWS * DIM > 2.5e9 and max(sizes) <= 1 << 30, sizes

    def rows():
        return variable.sparse_read(tf.constant(IDS)).numpy()

    def train():
        before = rows()
        x = np.repeat(IDS, 4)[:, None]
        model.fit(x, np.ones([len(x), 1, DIM], "float32"), batch_size=len(x), verbose=0)
        assert np.all(np.abs(rows() - before).max(1) > 0)

    train()
    trained = rows()
    model.save_weights(folder / "table.weights.h5")
    print("saved weights", flush=True)
    with h5py.File(folder / "table.weights.h5") as file:
        found = []
        file.visititems(lambda _, each: found.append(each) if hasattr(each, "shape") else None)
        (stored,) = [each for each in found if each.shape == (ROWS, DIM)]
        for i, row in zip(IDS, trained):
            np.testing.assert_array_equal(stored[i], row)
    train()
    model.load_weights(folder / "table.weights.h5")
    np.testing.assert_array_equal(rows(), trained)
    (folder / "table.weights.h5").unlink()
    print("loaded weights", flush=True)
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.write(str(folder / "checkpoint"))
    train()
    checkpoint.read(str(folder / "checkpoint")).assert_consumed()
    np.testing.assert_array_equal(rows(), trained)
    print("loaded checkpoint", flush=True)


if __name__ == "__main__":
    main()
