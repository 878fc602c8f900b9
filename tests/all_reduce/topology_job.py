"""What each of four workers does in `test_topology.py`; results go to one file for each worker."""

import argparse
import itertools
import json
import os
import pathlib
from unittest import mock

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus import cluster, compression, updates
from keras_psplus.all_reduce.step.updating import MirroredUpdates
from keras_psplus.all_reduce.topology import auto_topology, links
from keras_psplus.all_reduce.topology import group_topology as topology_module
from tests.all_reduce import updates_job
from tests.all_reduce.job_parts import Interrupt, Interrupted, compress

WORKERS, BATCH = 4, 8
NAMES = [f"worker-{i}" for i in range(WORKERS)]
TOPOLOGIES = {
    "pairs": [["worker-0", "worker-1"], ["worker-2", "worker-3"]],
    # Of the replicas of one worker each.
    "hosts": [["worker-0"], ["worker-1"]],
    # Neighbours in rank order are in different groups.
    "apart": [[3, 0], [1, 2]],
    "three": [["worker-0", "worker-1", "worker-2"], ["worker-3"]],
}
# How gradients of a constant are compressed; each has an error that feedback bounds.
COMPRESSIONS = {
    "int8": compression.Int8(block_size=16),
    "topk": compression.TopK(0.2),
    "powersgd": compression.PowerSGD(2, min_compression_rate=1),
    "by_variable": compression.ByVariable({"*kernel": compression.Sign(32)}, min_size=1),
    "both": dict.fromkeys(["within", "between"], compression.Int8(block_size=16)),
    "halves": {"within": compression.Cast("float16", error_feedback=True)},
}
ROWS = 37
LOCAL = {"local_sgd": updates.LocalSGD(2), "diloco": updates.DiLoCo(3, alpha=0.25)}
# Which of them are tried on which topology: each way on one, at least.
CASES = [
    *("exact pairs", "exact apart", "loops three", "accumulated pairs"),
    *("int8 pairs", "topk pairs", "powersgd pairs", "by_variable pairs", "both apart"),
    "halves pairs",
    *("both three", "local_sgd three", "diloco apart"),
    *("resumed pairs", "resumed three", "auto three"),
]
HOST_CASES = ["exact hosts", "local_sgd hosts"]


def problem():
    """Batches of 8 rows, and a last one of 5: one worker has 2, the others 1."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, size=(ROWS, 3)).astype("int32")
    return ids, rng.normal(size=(ROWS, 2)).astype("float32")


def everything(optimizer=None, **options):
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
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
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


STEPS = (6, 24)


class Seen(keras.callbacks.Callback):
    """Weights after so many steps."""

    def __init__(self):
        super().__init__()
        self.weights = {}

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 in STEPS:
            self.weights[batch + 1] = self.model.get_weights()


def exact(make, topology, out, key, **options):
    strategy = make(None, topology)
    with strategy.scope():
        model = everything(**options)
    model.fit(*problem(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    out[key] = result(strategy, model)


def compressed(make, topology, out, key, name):
    strategy, seen = make(COMPRESSIONS[name], topology), Seen()
    with strategy.scope():
        model = line()
    data = batches_of_line(STEPS[-1])
    model.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[seen])
    out[key] = result(strategy, model)
    for steps, weights in seen.weights.items():
        out[f"{key} {steps}"] = {**out[key], "weights": weights}


def with_updates(make, topology, out, key, policy):
    strategy = make(None, topology)
    strategy._updates = policy
    strategy.extended.updating = MirroredUpdates(policy, strategy)
    try:
        with strategy.scope():
            if policy.local:
                keras.utils.set_random_seed(1)
                model = updates_job.dense(keras.optimizers.SGD(0.1, momentum=0.9))
            else:
                model = everything()
        data = updates_job.problem() if policy.local else problem()
        batch = updates_job.BATCH if policy.local else BATCH
        model.fit(*data, batch_size=batch, shuffle=False, verbose=0)
        out[key] = result(strategy, model)
    finally:
        strategy._updates = strategy.extended.updating = None


def automatic(make, topology, out, key):
    """Links of one machine are measured; then those of racks are made up, and groups made."""
    strategy = make(None, "pairs")
    extended = strategy.extended
    extended.set_topology(topology_module.FLAT)
    measured = auto_topology.links_module.measure(extended)
    assert list(measured) == list(itertools.combinations(range(WORKERS), 2))
    assert all(0 < link.latency < 60 and 0 < link.transfer < 60 for link in measured.values())
    assert "worker-3" in auto_topology.decide(extended).report
    assert strategy.extended.levels is None
    groups = topology_module.get(TOPOLOGIES[topology], NAMES)
    with mock.patch.object(auto_topology.links_module, "measure") as measure:
        measure.return_value = {
            pair: links.MeasuredLink(
                1e-4, 1.0 if groups.group_of(pair[0]) == groups.group_of(pair[1]) else 9.0
            )
            for pair in measured
        }
        with mock.patch.object(auto_topology, "_WINS", 0.0):
            assert auto_topology.choose(extended) == topology_module.FLAT
        with mock.patch.object(auto_topology, "_WINS", float("inf")):
            assert auto_topology.choose(extended) == groups
    with strategy.scope():
        model = everything()
    model.fit(*problem(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    out[key] = result(strategy, model)


def resumed(make, topology, out, key, folder):
    """Interrupted and started again, it ends as if nothing had happened."""

    def train(*callbacks):
        strategy = make(COMPRESSIONS["both"], topology)
        with strategy.scope():
            model = line()
        model.fit(
            *batches_of_line(4),
            BATCH,
            epochs=4,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )
        return result(strategy, model)

    disk = os.path.join(folder, f"{key}-{os.getpid()}")
    try:
        train(keras.callbacks.BackupAndRestore(disk), Interrupt())
    except Interrupted:
        pass
    out[key] = train(keras.callbacks.BackupAndRestore(disk))
    out[f"whole {key}"] = train()


def result(strategy, model):
    traffic = {
        "/".join(t.path.split("/")[-2:]): (
            t.compressor,
            t.logical_bytes,
            t.compressed_bytes,
            t.wire_bytes,
            t.between_groups_bytes,
        )
        for t in strategy.communication.traffic()
    }
    return {"weights": model.get_weights(), "traffic": traffic}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    if args.devices > 1:
        devices = [tf.config.LogicalDeviceConfiguration() for _ in range(args.devices)]
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, devices)
    first = TOPOLOGIES["hosts" if args.devices > 1 else "pairs"]
    strategy = keras_psplus.MultiWorkerMirroredStrategy(topology=first)
    names = NAMES[: strategy.num_workers]

    def make(compressor, topology):
        # A process has one strategy; each case gets the part of it that sums.
        compress(strategy, compressor, 1500, topology_module.get(TOPOLOGIES[topology], names))
        return strategy

    out = {}
    for key in args.cases:
        kind, name = key.split()
        if kind == "exact":
            exact(make, name, out, key)
        elif kind == "loops":
            exact(make, name, out, key, steps_per_execution=3)
        elif kind == "auto":
            automatic(make, name, out, key)
        elif kind == "accumulated":
            with_updates(make, name, out, key, updates.Accumulate(2))
        elif kind in LOCAL:
            with_updates(make, name, out, key, LOCAL[kind])
        elif kind == "resumed":
            resumed(make, name, out, key, args.out)
        else:
            compressed(make, name, out, key, kind)
    arrays = {
        f"{key}/{i}": weight for key, got in out.items() for i, weight in enumerate(got["weights"])
    }
    index = cluster.read_task_config().task_index
    np.savez(pathlib.Path(args.out, f"worker-{index}.npz"), **arrays)
    traffic = {key: got["traffic"] for key, got in out.items()}
    pathlib.Path(args.out, f"worker-{index}.json").write_text(json.dumps(traffic))


if __name__ == "__main__":
    main()
