"""Update policies of one worker, with two parameter servers, in one process.

updates_job.py FOLDER CASE [CASE ...]

Trains cases of the tests for all-reduce, and some of parameter servers only. Results go to
`FOLDER/results.npz` and `FOLDER/numbers.json`.
"""

import gc
import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import keras_psplus
from keras_psplus import updates
from keras_psplus.cluster.in_process import InProcessCluster
from keras_psplus.parameter_server.transport.compressors import Compressors
from keras_psplus.parameter_server.updates.local_sgd_updates import LocalSGDUpdates
from keras_psplus.parameter_server.updates.worker_updates import WorkerUpdates
from tests.all_reduce import updates_job
from tests.all_reduce.updates_job import (
    OfParts,
    accumulated,
    dense,
    embedding,
    fit,
    problem,
    resumed,
    with_dropout,
)

# Under parameter servers nothing runs eagerly; "optimizers" is "flush" without the flush.
ACCUMULATED = [name for name in updates_job.ACCUMULATED if name not in ("eagerly", "optimizers")]
RESUMED = {
    "accumulate": (updates.Accumulate(3), "int8", embedding),
    "local": (updates.LocalSGD(3), "topk:0.3", with_dropout),
}


def scaled_adam():
    adam = keras.optimizers.Adam(0.02)
    return dense(keras.optimizers.LossScaleOptimizer(adam, initial_scale=2.0**8))


# Of one worker alone, they come to the same as without the policy.
LOCAL = {
    "post-local": (
        updates.LocalSGD(3, start_step=6),
        lambda: dense(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.8)),
    ),
    "embedding": (updates.LocalSGD(2, average_slots=True), embedding),
    "loss_scale": (updates.LocalSGD(3), scaled_adam),
}


def partitioner(shape, dtype):
    """Cuts the embedding and the first kernel, and keeps the others whole."""
    return [2 if shape[0] in (20, 6) else 1] + [1] * (len(shape) - 1)


def making(strategy):
    """A function that makes strategies of other policies: a process has one that is connected."""

    def make(policy, compressor=None):
        # What is resumed is found by an optimizer's name, that of no other one that lives.
        gc.collect()
        keras.backend.clear_session()
        kind = LocalSGDUpdates if policy is not None and policy.local else WorkerUpdates
        strategy._context.updating = kind(strategy._context, policy)
        strategy.extended.pushes._compressors = Compressors(compressor, None)
        strategy._context.totals._bytes.clear()
        return strategy

    return make


def sent(strategy):
    """Bytes of gradients that have been sent."""
    found = [one for one in strategy.communication.traffic() if one.direction == "gradient"]
    return sum(one.logical_bytes for one in found)


def by_keras(strategy, make, out):
    """Keras's own accumulation: the gradients of five batches, then a sum."""
    make(None)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense(keras.optimizers.SGD(0.3, gradient_accumulation_steps=3))
    fit(model, epochs=2)
    out["by keras"] = {"weights": model.get_weights(), "numbers": [sent(strategy)]}
    with strategy.scope():
        model = embedding_accumulated_by_keras()
    fit(model, epochs=2)
    out["rows by keras"] = {"weights": model.get_weights(), "numbers": None}


def embedding_accumulated_by_keras():
    keras.utils.set_random_seed(1)
    model = embedding()
    # Squares of sums are not sums of squares.
    model.compile(keras.optimizers.Adam(0.02, gradient_accumulation_steps=3), "mse")
    return model


def finished_by_hand(strategy, make, out):
    """What an epoch leaves waits, is known of, and is sent when the script says so."""
    # A compressor that loses nothing sees the sums.
    make(updates.Accumulate(3), "topk:1.0")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense("sgd")
    fit(model, epochs=1)
    numbers = [strategy._context.updating.pending, int(model.optimizer.iterations.numpy())]
    strategy.finish_updates(model.optimizer)
    strategy.finish_updates(model.optimizer)
    numbers += [strategy._context.updating.pending, int(model.optimizer.iterations.numpy())]
    out["finished"] = {"weights": model.get_weights(), "numbers": numbers}


def everything(model):
    """The values of a model's weights, and of its optimizer's variables."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [*model.get_weights(), *(variable.numpy() for variable in inner.variables)]


def local(strategy, make, out, name):
    policy, build = LOCAL[name]
    make(policy)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    fit(model)
    out[f"local {name}"] = {"weights": everything(model), "numbers": sent(strategy)}


class Look(keras.callbacks.Callback):
    """Evaluates in the middle of a round."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.evaluate(*problem(), verbose=0)
            self.weights = self.model.get_weights()


def looked_at(strategy, make, out):
    make(updates.LocalSGD(100))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense("sgd")
    look = Look()
    fit(model, 1, [look])
    out["looked at"] = {"weights": look.weights, "numbers": None}


def refused(strategy, make, out):
    make(updates.LocalSGD(3))
    with strategy.scope():
        model = OfParts(keras.optimizers.SGD(0.1))
        model.compile()
    try:
        fit(model)
        message = "nothing"
    except ValueError as error:
        message = str(error)
    out["refused"] = {"weights": [], "numbers": message}


def main():
    folder, cases = sys.argv[1], sys.argv[2:]

    def chosen(kind, names):
        return [name for name in names if f"{kind} {name}" in cases]

    cluster = InProcessCluster(workers=1, ps=2)
    cluster.start()
    strategy = keras_psplus.ParameterServerStrategy(cluster.cluster_resolver, partitioner)
    make, out = making(strategy), {}
    for name in chosen("accumulated", ACCUMULATED):
        accumulated(make, out, [name])
        out[f"accumulated {name}"]["numbers"][1] = sent(strategy)
    if "by keras" in cases:
        by_keras(strategy, make, out)
    if "finished" in cases:
        finished_by_hand(strategy, make, out)
    for name in chosen("local", LOCAL):
        local(strategy, make, out, name)
    if "looked at" in cases:
        looked_at(strategy, make, out)
    if "refused" in cases:
        refused(strategy, make, out)
    resumed(make, out, folder, {name: RESUMED[name] for name in chosen("resumed", RESUMED)})
    arrays = {
        f"{name}/{i}": weight for name, of in out.items() for i, weight in enumerate(of["weights"])
    }
    np.savez(os.path.join(folder, "results.npz"), **arrays)
    numbers = {name: of["numbers"] for name, of in out.items()}
    pathlib.Path(folder, "numbers.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
