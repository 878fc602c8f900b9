"""Trains on two devices in one process and prints, in JSON, which hooks asked an engine.

Before, it prints the way of a gradient: see `gradient_trace.py`.

With `--replaced`, prints which functions `import keras_psplus` has replaced instead.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

_PACKAGES = ("keras", "keras_rs", "tensorflow")


def functions():
    """All functions of Keras, TensorFlow and KerasRS by names, and what Python's exit is."""
    found = {"sys.exit": sys.exit}
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

    after = functions()
    changed = {name for name in before if name in after and before[name] is not after[name]}
    # Functions that a class had of another class, or not at all.
    changed |= {name for name in after if name not in before and is_of_library(after[name])}
    print(json.dumps([sorted(changed), sorted(hook.where for hook in HOOKS)]))


def asked():
    from keras_psplus.cluster.in_process import logical_devices
    from keras_psplus.keras_hooks import HOOKS

    logical_devices(2)
    from tests.keras_hooks import gradient_trace

    way = gradient_trace.trace()
    functions = {file: sorted(names) for file, names in sorted(way.functions.items())}
    print(json.dumps([functions, way.hooks]))
    seen = set()

    def watch(hook):
        installed = getattr(hook.owner, hook.name)

        @functools.wraps(installed)
        def watched(*args, **kwargs):
            if hook.engine(args, kwargs) is not None:
                seen.add(hook.where)
            return installed(*args, **kwargs)

        setattr(hook.owner, hook.name, watched)

    for hook in HOOKS:
        watch(hook)
    train()
    leave()
    print(json.dumps([sorted(seen), sorted(hook.where for hook in HOOKS)]))


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
        return super().train_step(data)


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
        model.fit(x, y, batch_size=4, epochs=1, verbose=1)
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
    from keras_psplus.cluster.process import exit_code

    exit_code.watch()
    with contextlib.suppress(SystemExit):
        sys.exit(0)


if __name__ == "__main__":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    replaced() if "--replaced" in sys.argv else asked()
