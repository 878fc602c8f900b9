"""Ways of training with a table, for a cluster and for one process that is the reference.

training_job.py FOLDER CASES [--reference | --shard]

The reference has a dense table in the place of the embedding: its gradient is whole, so that it is
what any optimizer makes of it. In the cases whose optimizer has momenta, every batch touches all
rows: the tables' optimizers are lazy, and differ otherwise by design.
"""

import importlib.util
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.all_reduce.step.updating import MirroredUpdates

ROWS, DIM, BATCH = 24, 8, 16
optimizers, schedules = keras.optimizers, keras.optimizers.schedules


@keras.saving.register_keras_serializable("training_job")
class OwnAdam(optimizers.Adam):
    """An optimizer that the library does not know."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + 0.01 * variable, variable, learning_rate)


class OneHot(keras.layers.Layer):
    """An embedding whose gradient is dense."""

    def __init__(self, rows, dim, embeddings_initializer, **kwargs):
        self.options = {
            key: kwargs.pop(f"embeddings_{key}", None) for key in ("regularizer", "constraint")
        }
        super().__init__(**kwargs)
        self.rows, self.dim, self.initializer = rows, dim, embeddings_initializer

    def build(self, shape):
        self.embeddings = self.add_weight(
            shape=(self.rows, self.dim), initializer=self.initializer, name="e", **self.options
        )

    def call(self, ids):
        return keras.ops.one_hot(ids, self.rows, dtype="float32") @ self.embeddings


class Case:
    """One way of training."""

    batch, epochs, steps_per_execution, policy = BATCH, 2, 1, "float32"
    tolerance, is_whole, jit_compile = 2e-6, False, "auto"
    options = {}

    def optimizer(self):
        return optimizers.SGD(0.5)

    def model(self, embedding):
        ids = keras.Input((5,), dtype="int32")
        rows = embedding(ROWS, DIM, embeddings_initializer=initializer(7), **self.options)(ids)
        return keras.Model(ids, head(keras.layers.Flatten()(rows)))

    def fit(self, embedding, reference, x, y):
        keras.utils.set_random_seed(1)
        keras.mixed_precision.set_global_policy(self.policy)
        model = self.model(embedding)
        model.compile(
            optimizer=self.optimizer(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=self.steps_per_execution,
            jit_compile=self.jit_compile,
        )
        history = model.fit(
            x, y, batch_size=self.batch, epochs=self.epochs, shuffle=False, verbose=0
        ).history
        keras.mixed_precision.set_global_policy("float32")
        results = {}
        if self.is_whole:
            results["evaluated"] = model.evaluate(x, y, batch_size=40, verbose=0)
            results["predicted"] = model.predict(x[:21], batch_size=8, verbose=0)
            results.update(history)
        results.update(self.trained(model, x, y))
        results.update({f"weight_{i}": w for i, w in enumerate(model.get_weights())})
        return results

    def trained(self, model, x, y):
        """What else to do with the model; returns results."""
        return {}


def initializer(seed):
    return keras.initializers.RandomUniform(-0.05, 0.05, seed=seed)


def head(features):
    features = keras.layers.Dense(
        10, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(3)
    )(features)
    return keras.layers.Dense(
        3, dtype="float32", kernel_initializer=keras.initializers.GlorotUniform(4)
    )(features)


def by(make, **attributes):
    """A case with another optimizer."""
    attributes["optimizer"] = lambda self: make()
    return type("Case", (Case,), attributes)()


@keras.saving.register_keras_serializable()
class Own(keras.initializers.Initializer):
    """An initializer that the servers do not know."""

    def __call__(self, shape, dtype=None):
        return initializer(8)(shape, dtype)


class TwoTables(Case):
    """Two tables, one of them shared by two layers' calls, one with a sum over several ids.

    What comes after them is compiled.
    """

    jit_compile, tolerance = True, 2e-5

    def model(self, embedding):
        ids = keras.Input((5,), dtype="int32")
        shared = embedding(ROWS, DIM, embeddings_initializer=initializer(7))
        other = embedding(ROWS, 4, embeddings_initializer=Own())
        several = keras.ops.sum(other(ids), axis=1)
        parts = [shared(ids[:, :2]), shared(ids[:, 3:])]
        parts = [keras.layers.Flatten()(part) for part in parts]
        return keras.Model(ids, head(keras.layers.Concatenate()([*parts, several])))


class BesideRows(Case):
    """A table on servers, and one on workers, whose gradients are rows until they are clipped."""

    is_whole, tolerance = True, 2e-5

    def optimizer(self):
        return optimizers.Adam(0.05, global_clipnorm=0.05)

    def model(self, embedding):
        ids = keras.Input((5,), dtype="int32")
        rows = embedding(ROWS, DIM, embeddings_initializer=initializer(7))(ids)
        own = keras.layers.Embedding(ROWS, 4, initializer(9), name="on_workers")(ids)
        both = [keras.layers.Flatten()(part) for part in (rows, own)]
        return keras.Model(ids, head(keras.layers.Concatenate()(both)))

    def trained(self, model, x, y):
        return {f"slot_{i}": np.asarray(v) for i, v in enumerate(model.optimizer.variables)}


class Accumulated(Case):
    """Under `updates=Accumulate(2)`; the reference has batches twice as large."""

    def fit(self, embedding, reference, x, y):
        self.batch = 2 * BATCH if reference else BATCH
        return super().fit(embedding, reference, x, y)


class Again(Case):
    """A model that is compiled again; then the chief is late to set weights, and a branch looks up.

    The new optimizer has slots of its own, and no worker trains with weights that are not set yet.
    """

    tolerance = 2e-5

    def optimizer(self):
        return optimizers.Nadam(0.05)

    def model(self, embedding):
        ids = keras.Input((5,), dtype="int32")
        rows = embedding(ROWS, DIM, embeddings_initializer=initializer(7))
        branch = keras.layers.Lambda(
            lambda ids: tf.cond(
                tf.reduce_sum(ids) > 0,
                lambda: rows(ids),
                lambda: tf.zeros([tf.shape(ids)[0], 5, DIM]),
            ),
            output_shape=(5, DIM),
        )
        outer = keras.layers.Flatten()(keras.layers.Add()([rows(ids), branch(ids)]))
        return keras.Model(ids, head(outer))

    def trained(self, model, x, y):
        weights = model.get_weights()
        model.compile(optimizer=self.optimizer(), loss=model.loss)
        for delay in (0, 1):
            if tf.distribute.get_strategy().extended.should_checkpoint:
                time.sleep(delay)
            model.set_weights(weights)
            model.train_on_batch(x[:BATCH], y[:BATCH])
        return {f"slot_{i}": np.asarray(v) for i, v in enumerate(model.optimizer.variables)}


class OwnStep(Case):
    """A `train_step` of the user's own, that updates twice and looks up again in between."""

    def model(self, embedding):
        class Twice(keras.Model):
            def train_step(self, data):
                x, y = data
                for _ in range(2):
                    with tf.GradientTape() as tape:
                        loss = self.compute_loss(x, y, self(x, training=True))
                    variables = self.trainable_variables
                    self.optimizer.apply(tape.gradient(loss, variables), variables)
                return self.compute_metrics(x, y, self(x), None)

        ids = keras.Input((5,), dtype="int32")
        rows = embedding(ROWS, DIM, embeddings_initializer=initializer(7))(ids)
        return Twice(ids, head(keras.layers.Flatten()(rows)))


class OfKerasRS(Case):
    """KerasRS's layer: one table for two features, summed and averaged, and one on the workers.

    The reference is the same layer in one process; its gradients are sparse.
    """

    def model(self, embedding):
        import keras_rs

        def table(name, placement, combiner="mean"):
            return keras_rs.layers.TableConfig(
                name, ROWS, DIM, initializer(9), "sgd", combiner, placement
            )

        def feature(name, table, length):
            return keras_rs.layers.FeatureConfig(name, table, (None, length), (None, DIM))

        shared = table("shared", "parameter_server", "sqrtn")
        configs = {
            "two": feature("two", shared, 2),
            "three": feature("three", shared, 3),
            "automatic": feature("automatic", table("automatic", "auto", "sum"), 5),
            "here": feature("here", table("here", "default_device"), 2),
        }
        ids = keras.Input((5,), dtype="int32")
        features = {"two": ids[:, :2], "three": ids[:, 2:], "automatic": ids, "here": ids[:, 1:3]}
        layer = keras_rs.layers.DistributedEmbedding(configs)
        again = keras_rs.layers.DistributedEmbedding.from_config(layer.get_config())
        embedded = again(features)
        return keras.Model(ids, head(keras.layers.Concatenate()(list(embedded.values()))))


CASES = {
    "sgd": by(lambda: optimizers.SGD(0.5), is_whole=True),
    "adagrad": by(lambda: optimizers.Adagrad(0.5), batch=19, steps_per_execution=3),
    "adam_w": by(
        lambda: optimizers.AdamW(
            schedules.ExponentialDecay(0.05, 3, 0.5), weight_decay=0.1, clipvalue=0.001
        ),
        tolerance=2e-5,
    ),
    "own_optimizer": by(lambda: OwnAdam(0.01), tolerance=2e-5),
    "global_clipnorm": by(lambda: optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.05)),
    "clipnorm": by(lambda: optimizers.SGD(0.5, clipnorm=0.02)),
    "mixed_precision": by(lambda: optimizers.SGD(0.5), policy="mixed_float16", tolerance=2e-3),
    "of_rows": by(
        lambda: optimizers.SGD(0.5),
        options={
            "embeddings_regularizer": keras.regularizers.L2(0.05),
            "embeddings_constraint": keras.constraints.UnitNorm(1),
        },
    ),
    "two_tables": TwoTables(),
    "beside_rows": BesideRows(),
    "own_step": OwnStep(),
    "again": Again(),
}
if importlib.util.find_spec("keras_rs"):
    CASES["keras_rs"] = OfKerasRS()
# The last: the cluster's strategy has `updates` from then on.
CASES["accumulated"] = Accumulated()


def data():
    random = np.random.default_rng(0)
    x, y = random.integers(0, ROWS, (96, 5)), random.integers(0, 3, (96,))
    # All rows are in each batch, and one more than once.
    for i in range(5):
        x[i::BATCH] = np.arange(5 * i, 5 * i + 5) % ROWS
    return x.astype("int32"), y


def run_cases(cases, strategy, embedding, folder, alone):
    """Leaves what each case comes to, from the same seed, with the model's weights.

    Args:
        cases: Dict from names to functions of a kind of layer and `data`, which return a model and
            a dict of results.
        strategy: `HybridStrategy`.
        embedding: The kind of layer.
        folder: For the files.
        alone: Whether this is the one process that others are held against.
    """
    for name, case in cases.items():
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, results = case(embedding, *data())
        results.update({f"weight_{i}": w for i, w in enumerate(model.get_weights())})
        leave(results, name, strategy, folder, alone)


def leave(results, name, strategy, folder, alone):
    """Writes a case's results to a file of this task's."""
    who = "reference" if alone else strategy.task.name
    np.savez(folder / f"{name}-{who}.npz", **results)
    print(f"done {name}", flush=True)


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
    reference = "--reference" in sys.argv
    shard = "optimizer" if "--shard" in sys.argv else None
    placement = {"on_workers/*": "mirrored", "*": "parameter_server"}
    strategy = psp.HybridStrategy(placement=placement, shard=shard)
    x, y = data()
    for name in names:
        if name == "accumulated" and not reference:
            strategy._updates = psp.updates.Accumulate(2)
            strategy.extended.updating = MirroredUpdates(strategy._updates, strategy)
        with strategy.scope():
            embedding = OneHot if reference else keras.layers.Embedding
            results = CASES[name].fit(embedding, reference, x, y)
        leave(results, name, strategy, folder, reference)
    if not reference and strategy.is_chief:
        print(f"tables {len(strategy._context.tables.all)}")


if __name__ == "__main__":
    main()
