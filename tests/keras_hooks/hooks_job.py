"""Trains on two devices in one process and prints, in JSON, which hooks asked an engine.

With `--gradient`, prints the way of a gradient instead (see `gradient_trace.py`); with
`--replaced`, which functions `import keras_psplus` and its first strategy have replaced; with
`--servers`, which hooks asked when it trains with parameter servers.
"""

import contextlib
import functools
import json
import os
import pathlib
import random
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

_PACKAGES = ("keras", "keras_rs", "tensorflow")
# Replaces constructors for all that is made of them.
STOCK = "cluster.process.stock_strategies"


def functions():
    """All functions of Keras, TensorFlow and KerasRS by names, and what Python's exit is."""
    found = {"sys.exit": sys.exit, "sys.excepthook": sys.excepthook}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.split(".")[0] not in _PACKAGES:
            continue
        for key, value in list(vars(module).items()):
            home = getattr(value, "__module__", None) or ""
            if isinstance(value, type) and home.split(".")[0] in _PACKAGES:
                for attribute, function in list(vars(value).items()):
                    if callable(function) or isinstance(function, (property, classmethod)):
                        found[f"{home}.{value.__qualname__}.{attribute}"] = function
            elif callable(value) and (home == name or not home):
                found[f"{name}.{key}"] = value
    return found


def is_of_library(function):
    code = getattr(function, "__code__", None)
    return code is not None and "keras_psplus" in pathlib.Path(code.co_filename).parts


def replaced():
    import keras_rs  # noqa: F401

    # As its own command, the library changes nothing when it is imported. What it imports of Keras
    # and TensorFlow is there before.
    sys.argv[0] = "keras-psplus"
    import keras_psplus.keras_internals.keras_parts
    import keras_psplus.tf_internals  # noqa: F401

    before = functions()
    import keras_psplus

    keras_psplus._load()
    from keras_psplus.keras_hooks import HOOKS

    by_import = changed_since(before)
    # Files that have such layers are loaded.
    assert "keras_psplus>DynamicEmbedding" in keras.saving.get_custom_objects()
    keras_psplus.MultiWorkerMirroredStrategy()
    for_all = [hook for hook in HOOKS if hook.find is not None or hook.ask == STOCK]
    listed = sorted(hook.where for hook in for_all)
    print("found", json.dumps([by_import, changed_since(before), listed]))


def changed_since(before):
    after = functions()
    changed = {name for name in before if name in after and before[name] is not after[name]}
    # Functions that a class had of another class, or not at all.
    changed |= {name for name in after if name not in before and is_of_library(after[name])}
    return sorted(changed)


def asked():
    from keras_psplus.cluster.in_process import logical_devices
    from keras_psplus.cluster.process import early_init
    from keras_psplus.keras_hooks import HOOKS
    from keras_psplus.tf_internals import trace_end

    logical_devices(2)
    with watching(HOOKS) as seen:
        traces = []
        note_calls(trace_end._Outputs, "extend", lambda *args: traces.append(args))
        train()
        leave()
    if traces:
        seen.add("tensorflow.python.framework.func_graph.func_graph_from_py_func")
    task = {"type": "worker", "index": 0}
    two = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": task}
    with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(two)):
        for hook in HOOKS:
            if hook.ask == STOCK:
                try:
                    hook.owner()
                except RuntimeError:
                    seen.add(hook.where)
    if early_init._state.frames:
        seen.add("tensorflow.python.eager.context.Context.ensure_initialized")
    print("found", json.dumps(sorted(seen)))


def gradient():
    from keras_psplus.cluster.in_process import logical_devices
    from tests.keras_hooks import gradient_trace

    logical_devices(2)
    way = gradient_trace.trace()
    functions = {file: sorted(names) for file, names in sorted(way.functions.items())}
    print("found", json.dumps([functions, way.hooks]))


def note_calls(owner, name, note):
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args, **kwargs):
        note(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, noted)


@contextlib.contextmanager
def watching(hooks):
    """Context that yields the names of the hooks which ask an engine in it."""
    from keras_psplus import activation

    activation.activate()
    seen, installed = set(), []

    def watch(hook):
        def note(*args, **kwargs):
            if hook.engine(args, kwargs) is not None:
                seen.add(hook.where)

        installed.append((hook, getattr(hook.owner, hook.name)))
        note_calls(hook.owner, hook.name, note)

    for hook in hooks:
        if hook.find is not None:
            watch(hook)
    try:
        yield seen
    finally:
        for hook, function in installed:
            setattr(hook.owner, hook.name, function)


def servers():
    """A worker and a server in this process, with what a job of several processes has besides."""
    drawn = random.getstate()
    import keras_psplus

    keras_psplus._load()
    assert random.getstate() == drawn, "The import has drawn numbers that a script's seed is for."
    from keras_psplus.cluster.in_process import InProcessCluster
    from keras_psplus.keras_hooks import HOOKS
    from keras_psplus.parameter_server.pulls import PulledVariable

    with InProcessCluster(workers=1, ps=1) as cluster, watching(HOOKS) as seen:
        strategy = keras_psplus.ParameterServerStrategy(cluster.cluster_resolver, max_staleness=1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
        if hasattr(keras.optimizers, "MultiOptimizer"):
            strategy = keras_psplus.ParameterServerStrategy(cluster.cluster_resolver, mode="sync")
            with strategy.scope():
                several = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                rules = keras.optimizers.OptimizerMap(keras.optimizers.SGD())
                several.compile(keras.optimizers.MultiOptimizer(rules), "mse")
            several.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
        others = {
            "tensorflow.python.ops.resource_variable_ops.ResourceVariable._read_variable_op": (
                isinstance(model.trainable_variables[0].value, PulledVariable)
            ),
        }
    print(
        "found", json.dumps(sorted(seen | {name for name, is_asked in others.items() if is_asked}))
    )
    sys.stdout.flush()
    os._exit(0)


class Model(keras.Model):
    """A little of everything that layers and steps ask of Keras."""

    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(5, 4)
        self.norm = keras.layers.BatchNormalization(synchronized=True)
        self.drop = keras.layers.Dropout(0.5)
        self.out = keras.layers.Dense(1)

    def call(self, x, training=None):
        embedded = self.norm(self.embed(x), training=training)
        return self.out(self.drop(tf.gather(embedded, 0, axis=1), training=training))

    def train_step(self, data):
        context = tf.distribute.get_replica_context()
        context.all_gather(tf.ones([1, 1]), axis=0)
        tf.gather(self.embed.embeddings, [0, 1])
        tf.gather_nd(self.embed.embeddings._value, [[0], [1]])
        logs = super().train_step(data)
        kernel, scores = self.out.kernel.value, tf.ones([1, 2])
        keras.losses.sparse_categorical_crossentropy(keras.ops.argmax(scores, axis=-1), scores)
        keras.losses.categorical_crossentropy(scores, scores)

        @tf.function
        def gradient_in_a_function():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(kernel))
            return tape.gradient(loss, kernel)

        gradient_in_a_function()
        return logs


class Total(keras.metrics.Sum):
    """A sum of what a model returns: Keras's own metrics are means."""

    def update_state(self, y, outputs, sample_weight=None):
        return super().update_state(outputs)


def train():
    import keras_psplus

    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = Model()
        inner = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
        model.compile(optimizer, loss, metrics=["mae", Total()])
    x = np.arange(12).reshape(6, 2) % 5
    y = np.ones((6, 1), "float32")
    with tempfile.TemporaryDirectory() as folder:
        save_and_load_plain(folder)
        callbacks = [
            keras.callbacks.BackupAndRestore(f"{folder}/backup"),
            keras.callbacks.ModelCheckpoint(f"{folder}/weights.weights.h5", save_weights_only=True),
        ]
        model.fit(
            x, y, batch_size=4, epochs=2, validation_data=(x, y), callbacks=callbacks, verbose=0
        )
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        model.fit(x, y, batch_size=4, epochs=1, callbacks=[swap], verbose=1)
        model.set_weights(model.get_weights())
        model.train_on_batch(x, y)
        model.test_on_batch(x, y)
        model.predict(x, verbose=0)
        model.predict_on_batch(x)
        # Data that end before the steps that Keras expects.
        model.evaluate(tf.data.Dataset.from_tensors((x, y)), steps=2, verbose=0)
        model.save(f"{folder}/model.keras")
        model.save_weights(f"{folder}/more.weights.h5")
        with strategy.scope():
            model.save(f"{folder}/in_scope.keras")
        model.export(f"{folder}/exported")
        archive = keras.export.ExportArchive()
        archive.track_and_add_endpoint("serve", model, [tf.TensorSpec([None, 2], tf.int32)])
        archive.write_out(f"{folder}/archive")
        with strategy.scope():
            masked = keras.Sequential(
                [keras.Input((2,)), keras.layers.Embedding(5, 1, mask_zero=True)]
            )
            masked.compile("sgd", "mse")
        masked.fit(x, y[:, :, None] * np.ones((1, 2, 1)), verbose=0)
        float(inner.learning_rate), int(inner.iterations)
        with strategy.scope():
            inner.iterations.assign_add(1)
            inner.iterations.assign_sub(1)
            keras.ops.take(model.embed.embeddings, [0], axis=0)
            keras.layers.Conv1D(1, 1)(tf.ones([1, 3, 2]))
            keras.optimizers.AdamW().exclude_from_weight_decay([model.embed.embeddings])
    import keras_rs

    with strategy.scope():
        table = keras_rs.layers.TableConfig("t", 5, 2, placement="auto")
        feature = keras_rs.layers.FeatureConfig("f", table, (4, 2), (4, 2))
        keras_rs.layers.DistributedEmbedding({"f": feature}).build({"f": (4, 2)})


def save_and_load_plain(folder):
    import keras_psplus

    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with keras_psplus.single_process():
        plain.compile("sgd", keras.losses.MeanSquaredError())
        for name in ("plain.keras", "plain.h5"):
            plain.save(f"{folder}/{name}")
            keras.models.load_model(f"{folder}/{name}")


def leave():
    from keras_psplus.cluster.process import signals

    signals.watch()
    with contextlib.suppress(SystemExit):
        sys.exit(0)
    sys.excepthook(ArithmeticError, ArithmeticError("shown by the job"), None)


if __name__ == "__main__":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    jobs = {"--gradient": gradient, "--replaced": replaced, "--servers": servers}
    jobs.get(sys.argv[-1], asked)()
