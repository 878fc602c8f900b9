"""What every worker does in `test_compression.py`; results go to one file for each worker."""

import argparse
import functools
import json
import os
import pathlib

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus import cluster, compression
from keras_psplus.compression.factors import outer_products
from tests.all_reduce.job_parts import Interrupt, Interrupted, compress

STEPS = 6
# Of each route one; what changes its rate, draws from the step, or keeps more than a residual.
COMPRESSORS = {
    "bf16": "bf16",
    # The rows that each worker sums: not of whole blocks, and, by variable, of whole ones.
    "int8": compression.Int8(block_size=32),
    "topk": compression.TopK(0.2),
    "topk_momentum": compression.TopK(0.2, momentum_correction=0.5),
    "topk_warmup": compression.TopK(0.1, warmup_epochs=2, steps_per_epoch=2),
    "randomk": "randomk:0.3",
    "powersgd": compression.PowerSGD(2, min_compression_rate=1),
    "powersgd_late": compression.PowerSGD(1, min_compression_rate=1, start_step=3),
    "by_variable": {"*kernel": compression.Int8(block_size=16)},
}
# What four workers show and two do not: a sum that is rounded on its way, cuts, what is gathered,
# and exchanged in turns.
OF_FOUR = ["bf16", "int8", "topk", "powersgd"]


def problem():
    """A linear model, so that gradients can be worked out by hand, and `STEPS` batches."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(8 * STEPS, 9)).astype("float32"), rng.normal(
        size=(8 * STEPS, 120)
    ).astype("float32")


def linear(optimizer, **kwargs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(120, name="linear")])
    model.compile(optimizer, "mse", **kwargs)
    return model


def fit(strategy, model, epochs=1, callbacks=(), **kwargs):
    x, y = problem()
    return model.fit(
        x, y, 8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **kwargs
    )


def every_compressor(make, out, names):
    for name in names:
        strategy = make(COMPRESSORS[name])
        with strategy.scope():
            model = linear(keras.optimizers.SGD(0.5))
        fit(strategy, model)
        traffic = {
            t.path.split("/")[-1]: (t.logical_bytes, t.compressed_bytes, t.wire_bytes)
            for t in strategy.communication.traffic()
        }
        out[name] = {"weights": model.get_weights(), "traffic": traffic}
        assert strategy.communication.seconds > 0
        assert "linear/kernel" in strategy.communication.summary()


def resumed(make, out, names, folder):
    """Interrupted and started again, it ends as if nothing had happened."""
    for name in names:

        def train(*callbacks, name=name):
            strategy = make(COMPRESSORS[name])
            with strategy.scope():
                model = linear(keras.optimizers.SGD(0.1))
            fit(strategy, model, epochs=4, callbacks=callbacks)
            return model.get_weights()

        for lost in (False, True) if name == "powersgd" else (False,):
            # Each worker has a disk of its own.
            disk = os.path.join(folder, f"{name}-{lost}-{os.getpid()}")
            try:
                train(keras.callbacks.BackupAndRestore(disk, save_freq=4), Interrupt(3))
            except Interrupted:
                pass
            own = pathlib.Path(disk, "compression")
            files = sorted(path.name for path in own.iterdir())
            assert files and all("-of-2-with-2-replicas-step-" in file for file in files), files
            if lost and cluster.read_task_config().task_index == 1:
                for path in own.iterdir():
                    path.unlink()
            out[f"resumed {name} {lost}"] = {
                "weights": train(keras.callbacks.BackupAndRestore(disk, save_freq=4))
            }
            assert not own.exists() or not list(own.iterdir())
        out[f"whole {name}"] = {"weights": train()}


def own_checkpoint(make, out, folder):
    def train(first, last, path=None):
        strategy = make("sign")
        with strategy.scope():
            model = linear(keras.optimizers.SGD(0.1))
        if path:
            with np.load(path + ".npz") as state:
                strategy.load_state_dict(model.optimizer, state)
            model.load_weights(path + ".weights.h5")
        fit(strategy, model, epochs=last, initial_epoch=first)
        return model, strategy

    path = os.path.join(folder, f"own-{os.getpid()}")
    model, strategy = train(0, 2)
    state = strategy.state_dict(model.optimizer)
    np.savez(path + ".npz", **state)
    model.save_weights(path + ".weights.h5")
    out["resumed by hand"] = {"weights": train(2, 4, path)[0].get_weights()}
    out["whole by hand"] = {"weights": train(0, 4)[0].get_weights()}

    def error_of(optimizer, state, model=None):
        try:
            strategy.load_state_dict(optimizer, state)
            if model is not None:
                fit(strategy, model, epochs=1)
        except ValueError as error:
            return str(error)

    others = {
        name.replace(f"-{own}-of-", f"-{1 - own}-of-"): array
        for own in (0, 1)
        for name, array in state.items()
        if f"-{own}-of-" in name
    }
    assert "Each worker loads what" in error_of(model.optimizer, others)
    fewer = {name.replace("-of-2/", "-of-3/"): array for name, array in state.items()}
    assert "the state is one of 3 replicas, and there are 2" in error_of(model.optimizer, fewer)
    assert "it has nothing for gradient/" in error_of(model.optimizer, {})
    assert "scope" in error_of(keras.optimizers.SGD(0.1), state)
    # Before the first step, which finds that the state is one of another compressor.
    strategy = make("powersgd:1")
    with strategy.scope():
        model = linear(keras.optimizers.SGD(0.1))
    error = error_of(model.optimizer, state, model)
    assert "it comes from another model, compressor or" in error, error


def not_finite(make, out, names):
    """A row that is not a number, on one worker: a scaled loss skips the step, plain SGD has it."""
    x, y = problem()
    x = x.copy()
    x[8 * 2, 3] = np.inf
    for name in names:
        # `few_not_finite` has top-k's without a scale.
        for scaled in {"bf16": (False,), "topk": (True,)}.get(name, (True, False)):
            strategy = make(COMPRESSORS.get(name, name))
            with strategy.scope():
                optimizer = keras.optimizers.SGD(0.1)
                if scaled:
                    optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
                model = linear(optimizer)
            model.fit(x, y, 8, shuffle=False, verbose=0)
            weights = model.get_weights()
            assert np.isfinite(weights[0]).all() == scaled, name
            out[f"not finite {name} {scaled}"] = {"weights": weights}


def few_not_finite(make, out):
    """What is no number on one worker, in fewer gradients than top-k sends of a large kernel."""
    strategy = make("topk:0.01")
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8, size)).astype("float32") for size in (400, 200))
    y[6, 17] = np.nan
    with strategy.scope():
        model = keras.Sequential([keras.Input((400,)), keras.layers.Dense(200, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.1), lambda y, pred: tf.reduce_mean(y * pred, -1))
    model.fit(x, y, 8, shuffle=False, verbose=0)
    out["few not finite"] = {"weights": model.get_weights()}


def embeddings(make, out):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 50, size=(48, 4))
    y = rng.normal(size=(48, 1)).astype("float32")
    for name, compressor in {
        "none": None,
        "repeated": None,
        "bf16": "bf16",
        "int8": "int8",
        "topk": compression.TopK(0.1),
        "topk whole": compression.TopK(1.0, error_feedback=False),
        "alone": compression.NoCommunication(),
    }.items():
        strategy = make(compressor)
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [
                    keras.Input((4,), dtype="int32"),
                    keras.layers.Embedding(50, 6, name="table"),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            # What its clipping does to rows depends on whether they come one by one.
            clip = {"clipvalue": 1e9} if name == "repeated" else {}
            model.compile(keras.optimizers.SGD(0.5, **clip), "mse")
        # The last batch has fewer rows on one worker than on the other.
        model.fit(ids[:43], y[:43], 8, shuffle=False, verbose=0)
        table = next(t for t in strategy.communication.traffic() if "table" in t.path)
        traffic = [table.logical_bytes, table.compressed_bytes, table.wire_bytes]
        out[f"embeddings {name}"] = {"weights": model.get_weights(), "traffic": {"table": traffic}}


def in_branches_and_loops(make, out):
    for name in ("int8", "topk", "powersgd"):
        strategy = make(COMPRESSORS[name])
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            model = linear(optimizer, steps_per_execution=2)
        fit(strategy, model, epochs=2)
        sent = strategy.communication.logical_bytes
        out[f"accumulated {name}"] = {"weights": model.get_weights(), "traffic": {"all": sent}}


def in_pieces(make, out):
    """A gradient that is cut, between blocks that the whole one has as well."""
    x, y = problem()
    for kind, bucket_bytes in (("pieces", 1000), ("whole", 1 << 30)):
        strategy = make(compression.Int8(block_size=16), bucket_bytes=bucket_bytes)
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(128, use_bias=False)])
            model.compile(keras.optimizers.SGD(0.5), "mse")
        model.fit(x[:, :8], np.pad(y, [[0, 0], [0, 8]]), 8, shuffle=False, verbose=0)
        sent = strategy.communication.wire_bytes
        out[f"sent {kind}"] = {"weights": model.get_weights(), "traffic": {"all": sent}}


def two_towers(make, out):
    """Layers of the same names in two parts of a model, and a variable of no elements."""

    class Nothing(keras.layers.Layer):
        def build(self, shape):
            self.nothing = self.add_weight(shape=(0, 3), initializer="ones", name="nothing")

        def call(self, inputs):
            return inputs + keras.ops.sum(self.nothing)

    x, y = problem()
    for kind in ("same", "unique"):
        strategy = make(compression.TopK(0.1))
        with strategy.scope():
            keras.utils.set_random_seed(1)
            towers = []
            for i in range(2):
                name = "hidden" if kind == "same" else f"hidden_{i}"
                inputs = keras.Input((9,))
                hidden = keras.layers.Dense(120, name=name)(inputs)
                towers.append(keras.Model(inputs, hidden, name=f"tower_{kind}_{i}"))
            inputs = keras.Input((9,))
            outputs = keras.layers.add([tower(Nothing()(inputs)) for tower in towers])
            model = keras.Model(inputs, outputs)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, 8, shuffle=False, verbose=0)
        out[f"towers {kind}"] = {"weights": [w for w in model.get_weights() if w.size]}


class MadeWhole(keras.layers.Dense):
    """A layer with a kernel whose gradient is no product, for the graph."""

    def call(self, inputs):
        return keras.ops.relu(keras.ops.matmul(inputs, 1.0 * self.kernel) + self.bias)


def wide_layers(make, out):
    """Gradients that are thin products, of few rows, and in the last batch of one worker none."""
    sums, make_sum = [], outer_products.MatrixPlusOuterProduct.__init__
    outer_products.MatrixPlusOuterProduct.__init__ = lambda self, *args: (
        make_sum(self, *args) or sums.append(self)
    )
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(49, 64)), rng.normal(size=(49, 1))
    for kind, layer in (("of factors", keras.layers.Dense), ("made whole", MadeWhole)):
        sums.clear()
        strategy = make(compression.PowerSGD(2))
        with strategy.scope():
            keras.utils.set_random_seed(1)
            layers = [layer(96, activation="relu"), layer(80, activation="relu")]
            model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0)
        sent = strategy.communication.compressed_bytes
        traffic = {"all": sent, "sums": len(sums)}
        out[f"wide {kind}"] = {"weights": model.get_weights(), "traffic": traffic}


FACTORS = ["all", "of loops", "of halves", "of no products", "of half no products"]
FACTORS_OF_FOUR = ["all", "of halves"]


def as_factors(make, out, workers):
    """Steps of few rows, in the last batch of one worker none, and of too many rows."""
    kinds = ["none", *(FACTORS if workers == 2 else FACTORS_OF_FOUR)]
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(49, 64)), rng.normal(size=(49, 1))
    many = rng.normal(size=(400, 64)), rng.normal(size=(400, 1))
    for kind, compressor, layer, options in (
        ("none", None, keras.layers.Dense, {}),
        ("all", "factors", keras.layers.Dense, {}),
        ("of loops", "factors", keras.layers.Dense, {"steps_per_execution": 2}),
        ("of halves", "factors:bf16", keras.layers.Dense, {}),
        ("of no products", "factors", MadeWhole, {}),
        ("of half no products", "factors:fp16", MadeWhole, {}),
    ):
        if kind not in kinds:
            continue
        strategy = make(compressor)
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    layer(96, activation="relu", name="first"),
                    layer(95, activation="relu", name="second"),
                    keras.layers.Dense(1, name="last"),
                ]
            )
            model.compile(keras.optimizers.SGD(0.05), "mse", **options)
        model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0)
        sent = {
            t.path: (t.compressed_bytes, t.wire_bytes) for t in strategy.communication.traffic()
        }
        model.fit(*many, 200, shuffle=False, verbose=0)
        traffic = {
            t.path.split("/", 1)[1]: (t.compressor, sent[t.path], t.compressed_bytes)
            for t in strategy.communication.traffic()
        }
        out[f"factors {kind}"] = {"weights": model.get_weights(), "traffic": traffic}


# With int8, `updates_job.py` resumes.
RESUMED = ["topk_momentum", "powersgd"]
# Of each route one.
NOT_FINITE = ["bf16", "int8", "topk", "powersgd", "factors"]
CASES = [
    *(f"compressor {name}" for name in COMPRESSORS),
    *("factors", "embeddings"),
    *(f"not_finite {name}" for name in NOT_FINITE),
    *("few_not_finite", "accumulated", "pieces", "towers", "wide"),
    *(f"resumed {name}" for name in RESUMED),
    "own_checkpoint",
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    folder = args.out
    task = cluster.read_task_config()
    if task.task_index == 1:
        # Workers with the library's own kernels and without compute the same bits.
        os.environ["KERAS_PSPLUS_NATIVE"] = "0"

    strategy = keras_psplus.MultiWorkerMirroredStrategy(compression="int8")

    def make(compressor, **options):
        # A process has one strategy; each case gets the part of it that compresses anew.
        compress(strategy, compressor, **options)
        return strategy

    functions = {
        "compressor": every_compressor,
        "factors": functools.partial(as_factors, workers=strategy.num_replicas_in_sync),
        "embeddings": embeddings,
        "not_finite": not_finite,
        "few_not_finite": few_not_finite,
        "accumulated": in_branches_and_loops,
        "pieces": in_pieces,
        "towers": two_towers,
        "wide": wide_layers,
        "resumed": functools.partial(resumed, folder=folder),
        "own_checkpoint": functools.partial(own_checkpoint, folder=folder),
    }
    out = {}
    # Whatever the order of the arguments.
    for case in [case for case in CASES if case in args.cases]:
        kind, *names = case.split()
        functions[kind](make, out, *([names] if names else []))
    arrays = {
        f"{name}/{i}": weight
        for name, got in out.items()
        for i, weight in enumerate(got["weights"])
    }
    np.savez(os.path.join(folder, f"worker-{task.task_index}.npz"), **arrays)
    traffic = {name: got["traffic"] for name, got in out.items() if "traffic" in got}
    pathlib.Path(folder, f"worker-{task.task_index}.json").write_text(json.dumps(traffic))


if __name__ == "__main__":
    main()
