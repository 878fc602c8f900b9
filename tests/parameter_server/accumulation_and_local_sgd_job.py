"""Two workers that accumulate or train by local SGD; the gradient is one, whatever the weights.

accumulation_and_local_sgd_job.py accumulate|local
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import keras_psplus
from keras_psplus import updates

WIDTH, RATE = 1000, 0.5


class Progress(keras.callbacks.Callback):
    """Lets the test meet the job half-way."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)
        if batch % 10 == 0:
            print(f"batch {batch}.", flush=True)


def fit(model, batches, epochs=1, **kwargs):
    x = np.ones((2 * batches, WIDTH), "float32")
    model.fit(x, x[:, :1], batch_size=2, epochs=epochs, verbose=0, **kwargs)


def traffic(strategy):
    found = {"gradient": 0, "pull": 0}
    for one in strategy.communication.traffic():
        if "kernel" in one.path:
            found[one.direction] += one.wire_bytes
    return found


def accumulate(strategy, model, report):
    fit(model, 30, epochs=2)
    report(first=int(model.optimizer.iterations.numpy()), first_traffic=traffic(strategy))
    # From now on nothing is sent.
    strategy._context.updating.policy = updates.Accumulate(1000)
    with strategy.scope():
        model = made()
    fit(model, 120, callbacks=[Progress()])
    report(pending=strategy._context.updating.pending, before=model.get_weights()[0].tolist()[0])
    strategy.finish_updates(model.optimizer)
    report(
        finished=int(model.optimizer.iterations.numpy()), after=model.get_weights()[0].tolist()[0]
    )


def local(strategy, model, report):
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(float(model.get_weights()[0].mean()))
    )
    fit(model, 42, epochs=2, callbacks=[look])
    report(iterations=int(model.optimizer.iterations.numpy()), seen=seen, traffic=traffic(strategy))


def made():
    model = keras.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(RATE), lambda y, output: output)
    return model


if __name__ == "__main__":
    kinds = {"accumulate": updates.Accumulate(4, flush=True), "local": updates.LocalSGD(5)}
    strategy = keras_psplus.ParameterServerStrategy(
        startup_timeout=60, heartbeat_timeout=30, updates=kinds[sys.argv[1]]
    )
    with strategy.scope():
        model = made()
    results = {}
    globals()[sys.argv[1]](strategy, model, results.update)
    print("result", json.dumps(results), flush=True)
