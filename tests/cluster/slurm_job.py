"""What `test_slurm.py` trains under Slurm: sums of weights that are to be equal, and a backup."""

import os
import sys
import time

import keras
import numpy as np

import keras_psplus as psp

IS_FIRST = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


class Held(keras.callbacks.Callback):
    """Says when epochs begin, and waits in one of them to be stopped."""

    def on_epoch_begin(self, epoch, logs=None):
        print(f"epoch {epoch} begins", flush=True)
        if IS_FIRST and os.environ.get("JOB_HELD_IN_EPOCH") == str(epoch):
            time.sleep(300)

    def on_train_batch_end(self, batch, logs=None):
        if IS_FIRST:
            time.sleep(float(os.environ.get("JOB_PAUSE", 0)))


has_table = bool(os.environ.get("JOB_TABLE"))
strategy = psp.strategy_from_env()
with strategy.scope():
    keras.utils.set_random_seed(1)
    if has_table:
        layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(100, 8)]
        layers.append(keras.layers.Flatten())
    else:
        layers = [keras.Input((3,))]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
rng = np.random.default_rng(0)
x = rng.integers(0, 100, (32, 3)).astype("int32")
x = x if has_table else (x / 100).astype("float32")
y = rng.standard_normal((32, 1)).astype("float32")
callbacks = [Held()]
if len(sys.argv) > 1:
    frequency = int(os.environ.get("JOB_SAVE_FREQ", 0)) or "epoch"
    callbacks.append(keras.callbacks.BackupAndRestore(sys.argv[1], save_freq=frequency))
history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
print(f"loss {history.history['loss'][-1]:.6f}", flush=True)
