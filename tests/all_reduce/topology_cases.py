"""Sums along two hops: `test_topology.py` says what they must come to."""

import itertools
from unittest import mock

import keras
import numpy as np

from tests.all_reduce import updates_cases
from tests.support.parts import resumed, swapped

WORKERS, BATCH, ROWS = 4, 8, 37
TOPOLOGIES = {
    "pairs": [["worker-0", "worker-1"], ["worker-2", "worker-3"]],
    # Neighbours in a ring are in two groups.
    "turns": [["worker-0", "worker-2"], ["worker-1", "worker-3"]],
    # Each group is of the replicas of one worker.
    "hosts": [["worker-0"], ["worker-1"]],
}
LOCAL = ("LocalSGD", {"every": 2})


def along(topology, **options):
    return swapped(topology=TOPOLOGIES[topology], bucket_bytes=1500, **options)


def compressor(name):
    """A compressor whose error feedback bounds."""
    from keras_psplus import compression

    int8 = compression.Int8(block_size=16)
    return {
        "int8": int8,
        "powersgd": compression.PowerSGD(2, min_compression_rate=1),
        "both": dict.fromkeys(["within", "between"], int8),
    }[name]


def problem():
    """Batches of 8 rows, and a last one of 5: one worker has 2, the others 1."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, size=(ROWS, 3)).astype("int32")
    return ids, rng.normal(size=(ROWS, 2)).astype("float32")


def everything(**options):
    """Rows of an embedding, matrices, convolutions, and numbers of 4 and 8 bytes."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Embedding(20, 4, name="table"),
        keras.layers.Conv1D(5, 2, activation="tanh", name="conv"),
        keras.layers.Flatten(),
        keras.layers.Dense(33, activation="tanh", name="first"),
        keras.layers.Dense(7, activation="tanh", dtype="float64", name="double"),
        keras.layers.Dense(2, name="last"),
    ]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


class Line(keras.Model):
    """Its loss is linear in its weights, so that gradients are those of the data alone."""

    def __init__(self):
        super().__init__()
        self.linear = keras.layers.Dense(40, name="linear")

    def call(self, inputs):
        return self.linear(inputs)


def line():
    """A model whose gradient is the same at every step."""
    keras.utils.set_random_seed(1)
    model = Line()
    model(np.zeros((1, 16)))
    model.compile(keras.optimizers.SGD(1.0), lambda y, pred: keras.ops.mean(y * pred, -1))
    return model


def batches_of_line(steps):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(BATCH, 16)), rng.normal(size=(BATCH, 40))
    return np.tile(x, [steps, 1]), np.tile(y, [steps, 1])


def fit(model, data, batch=BATCH, **options):
    model.fit(*data, batch_size=batch, shuffle=False, verbose=0, **options)


def in_one_process():
    model = everything()
    fit(model, problem(), epochs=2)
    return model, {}


def on_larger_batches():
    """Two batches at once; the last of five waits for another."""
    model, (ids, y) = everything(), problem()
    for rows in (slice(0, 2 * BATCH), slice(2 * BATCH, 4 * BATCH)):
        model.train_on_batch(ids[rows], y[rows])
    return model, {}


def exact(topology, **options):
    with along(topology) as strategy:
        model = everything(**options)
        fit(model, problem(), epochs=2)
        return model, traffic(strategy)


def accumulated(topology):
    with along(topology, updates="accumulate:2"):
        model = everything()
        fit(model, problem())
        return model, {}


def local(topology):
    with along(topology, updates=updates_cases.of(LOCAL)):
        model = updates_cases.dense(keras.optimizers.SGD(0.1, momentum=0.9))
        fit(model, updates_cases.problem(), updates_cases.BATCH)
        return model, {}


STEPS = (6, 24)


def compressed(name, topology):
    """Weights after some steps, and after more."""
    found = {}

    def look(batch, logs):
        if batch + 1 in STEPS:
            found.update({f"{batch + 1}/{i}": w for i, w in enumerate(model.get_weights())})

    with along(topology, compression=compressor(name)) as strategy:
        model = line()
        seen = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        fit(model, batches_of_line(STEPS[-1]), callbacks=[seen])
        return found | traffic(strategy)


def automatic(topology):
    """Links of one machine are measured; then those of racks are made up, and groups made."""
    from keras_psplus.all_reduce.topology import auto_topology, group_topology

    with swapped(bucket_bytes=1500) as strategy:
        extended, workers = strategy.extended, range(WORKERS)
        chosen = auto_topology.decide(extended)
        measured = chosen.links
        assert list(measured) == list(itertools.combinations(workers, 2))
        assert all(0 < link.latency < 60 and 0 < link.transfer < 60 for link in measured.values())
        assert "worker-3" in chosen.report
        assert extended.levels is None
        groups = group_topology.get(TOPOLOGIES[topology], [f"worker-{i}" for i in workers])
        of_racks = {
            (a, b): auto_topology.MeasuredLink(
                1e-4, 1.0 if groups.group_of(a) == groups.group_of(b) else 9
            )
            for a, b in measured
        }
        with mock.patch.object(auto_topology, "measure", return_value=of_racks):
            with mock.patch.object(auto_topology, "_WINS", 0.0):
                assert auto_topology.choose(extended) == group_topology.FLAT
            with mock.patch.object(auto_topology, "_WINS", float("inf")):
                assert auto_topology.choose(extended) == groups
        model = everything()
        fit(model, problem(), epochs=2)
        return model, traffic(strategy)


def interrupted(topology):
    """Interrupted and started again, and as a whole."""

    def train(*callbacks):
        with along(topology, compression=compressor("both")):
            model = line()
            fit(model, batches_of_line(4), epochs=4, callbacks=list(callbacks))
            return model.get_weights()

    found = {f"resumed/{i}": weight for i, weight in enumerate(resumed(train))}
    return found | {f"whole/{i}": weight for i, weight in enumerate(train())}


def traffic(strategy):
    """How each variable's gradients are compressed, and this worker's bytes of them."""
    found = {}
    for t in strategy.communication.traffic():
        path = "/".join(t.path.split("/")[-2:])
        found[f"how {path}"] = str(t.compressor)
        found[f"own bytes {path}"] = (
            *(t.logical_bytes, t.compressed_bytes),
            *(t.wire_bytes, t.between_groups_bytes),
        )
    return found
