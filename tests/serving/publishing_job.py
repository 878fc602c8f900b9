"""Training under `HybridStrategy` that publishes its table and exports its model.

publishing_job.py FOLDER

After the fourth step it waits until another process has looked rows up.
"""

import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

STEPS, BATCH, WAITED = 8, 16, 4


def main():
    folder = pathlib.Path(sys.argv[1])
    strategy = psp.HybridStrategy()
    random = np.random.default_rng(0)
    keys = random.integers(-(2**62), 2**62, 60)
    first = np.arange(STEPS * BATCH)[:, np.newaxis] // BATCH * 6
    x = keys[(first + random.integers(0, 18, (STEPS * BATCH, 3))) % 60]
    dataset = tf.data.Dataset.from_tensor_slices((x, np.ones([len(x), 1]))).batch(BATCH)
    with strategy.scope():
        ids = keras.Input((3,), dtype="int64", name="ids")
        expire = psp.tables.Unused(steps=3)
        table = psp.layers.DynamicEmbedding(4, combiner="sum", expire=expire, name="t")
        model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
        model.compile(keras.optimizers.Adagrad(0.3), "mse")

    ended = []

    def wait(batch, logs):
        if batch + 1 == WAITED and strategy.is_chief:
            rows = table.table.numpy()
            np.savez(folder / "now.npz", keys=table.keys, rows=rows, ended=ended)
            os.rename(folder / "now.npz", folder / "model.npz")
            end = time.monotonic() + 120
            while not (folder / "seen.npz").exists() and time.monotonic() < end:
                time.sleep(0.05)

    publish = psp.serving.PublishTables(folder / "published", every=1)
    of_batch = keras.callbacks.LambdaCallback
    noting = of_batch(on_train_batch_end=lambda batch, logs: ended.append(time.time()))
    callbacks = [noting, publish, of_batch(on_train_batch_end=wait)]
    model.fit(dataset, verbose=0, callbacks=callbacks)
    model.export(folder / "served" / "1")
    some = np.stack([keys[:20], keys[20:40], keys[40:]], 1)
    predicted = model.predict(some, verbose=0)
    if strategy.is_chief:
        np.savez(
            folder / "end.npz",
            ids=some,
            predicted=predicted,
            keys=table.keys,
            rows=table.table.numpy(),
        )


if __name__ == "__main__":
    main()
