"""Programs drawn by a seed, each a mixture of Keras's names and arguments.

    python -m tests.matrix.mixtures --seeds 0-40 [--columns "all-reduce" hybrid] [--without ema ...]

The matrix takes each name by itself, and most faults that were found later were of two that met. A
program takes a choice of each part: data, layers, head and loss, optimizer and its arguments,
arguments of `compile` and `fit`, callbacks, and what follows the first `fit`. To be run by hand;
`--without` leaves out choices, to find those that matter.
"""

import argparse
import contextlib
import random
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.matrix.columns import COLUMNS, Column
from tests.matrix.training import bundle, compiled, integers, numbers
from tests.support.layouts import LAYOUTS

L, R = keras.layers, keras.regularizers
TITLE = "mixtures: drawn"
WIDTH, IDS, STEPS = 6, 20, 5


class Draw:
    """Draws choices by a seed; `taken` are their names."""

    def __init__(self, seed, without):
        self._random, self._without, self.taken = random.Random(seed), without, []

    def one(self, part, *choices):
        """One of the choices, which are names."""
        left = [c for c in choices if c not in self._without]
        choice = self._random.choice(left or choices[:1])
        self.taken.append(f"{part}={choice}")
        return choice

    def some(self, part, chance, *choices):
        """Each of the choices with a chance."""
        drawn = [c for c in choices if self._random.random() < chance and c not in self._without]
        self.taken += [f"{part}+{c}" for c in drawn]
        return drawn

    def number(self, *numbers):
        return self._random.choice(numbers)


@keras.saving.register_keras_serializable("mixtures")
class AddedLoss(L.Layer):
    """Adds a loss of each row, averaged, and gives rows as they are."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@keras.saving.register_keras_serializable("mixtures")
class Counting(L.Layer):
    """Scales rows by a weight, and counts its calls in training."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.calls = self.add_weight(initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        return x * self.scale


def _layer(draw, kind, x):
    """A further layer over vectors."""
    if kind == "dense":
        return L.Dense(draw.number(5, 8), draw.one("activation", "tanh", "gelu", "linear"))(x)
    if kind == "regularised":
        return L.Dense(7, "tanh", kernel_regularizer=R.L2(0.01), bias_regularizer=R.L1(0.02))(x)
    if kind == "active":
        return L.Dense(6, "tanh", activity_regularizer=R.L2(0.05))(x)
    if kind == "constrained":
        return L.Dense(6, kernel_constraint=keras.constraints.MaxNorm(0.7))(x)
    if kind == "normalised":
        return L.LayerNormalization()(x)
    if kind == "group":
        return L.GroupNormalization(2)(L.Dense(8)(x))
    if kind == "batch":
        return L.BatchNormalization(synchronized=True)(x)
    if kind == "residual":
        return L.Add()([x, L.Dense(x.shape[-1], "relu")(x)])
    if kind == "shared":
        twice = L.Dense(x.shape[-1], "tanh")
        return twice(twice(x))
    if kind == "nested":
        return keras.Sequential([L.Dense(6, "tanh"), L.Dense(6)])(x)
    if kind == "frozen":
        return L.Dense(7, "tanh", trainable=False)(x)
    if kind == "adapted":
        dense = L.Dense(x.shape[-1], "tanh")
        x = dense(x)
        dense.enable_lora(2)
        return x
    if kind == "spectral":
        return L.SpectralNormalization(L.Dense(6))(x)
    if kind == "recurrent":
        return L.Bidirectional(L.SimpleRNN(3))(L.Reshape((x.shape[-1], 1))(x))
    if kind == "distributed":
        parts = L.RepeatVector(3)(x)
        return L.Flatten()(L.TimeDistributed(L.Dense(2, "tanh"))(parts))
    if kind == "added":
        return AddedLoss()(x)
    if kind == "counted":
        return Counting()(x)
    if kind == "einsum":
        return L.EinsumDense("ab,bc->ac", output_shape=6, bias_axes="c")(x)
    return L.UnitNormalization()(x)


LAYERS = (
    *("dense", "regularised", "active", "constrained", "normalised", "group", "batch"),
    *("residual", "shared", "nested", "frozen", "einsum", "unit", "adapted", "spectral"),
    *("recurrent", "distributed", "added", "counted"),
)


def _body(draw):
    """Inputs, and vectors of them."""
    kind = draw.one("input", "vectors", "ids", "masked", "attended", "two", "convolved")
    if kind == "vectors":
        inputs = x = keras.Input((WIDTH,))
    elif kind == "two":
        inputs = [keras.Input((WIDTH,)), keras.Input((STEPS,), dtype="int32")]
        table = L.Embedding(IDS, 4)
        x = L.Concatenate()([inputs[0], L.Flatten()(table(inputs[1]))])
    elif kind == "convolved":
        inputs = keras.Input((WIDTH, 3))
        x = L.GlobalMaxPooling1D()(L.Conv1D(6, 3, padding="same", activation="relu")(inputs))
    else:
        inputs = keras.Input((STEPS,), dtype="int32")
        regular = {"embeddings_regularizer": R.L2(0.01)} if draw.some("table", 0.2, "reg") else {}
        x = L.Embedding(IDS, 6, mask_zero=kind == "masked", **regular)(inputs)
        if kind == "ids":
            x = L.Flatten()(x)
        elif kind == "masked":
            recurrent = draw.one("recurrent", "gru", "lstm", "pooled")
            x = {"gru": L.GRU(5), "lstm": L.LSTM(5), "pooled": L.GlobalAveragePooling1D()}[
                recurrent
            ](x)
        else:
            # The gradient of a key's bias is zero up to rounding, which Lion makes a whole step.
            attention = L.MultiHeadAttention(2, 3, use_bias=False)
            x = L.GlobalAveragePooling1D()(attention(x, x))
    for place in range(draw.number(1, 2, 3)):
        x = _layer(draw, draw.one(f"layer{place}", *LAYERS), x)
    return kind, inputs, x


def _rows(kind, rows, seed=0):
    if kind in ("vectors", "convolved"):
        return numbers(rows, WIDTH, *([3] if kind == "convolved" else []), seed=seed)
    ids = integers(rows, STEPS, below=IDS, seed=seed + 1)
    ids[:, 0] += ids[:, 0] == 0  # Of a row that is all masked, means are of nothing.
    return ids if kind != "two" else (numbers(rows, WIDTH, seed=seed), ids)


def _heads(draw, x, rows):
    """Outputs, the losses, metrics of each, and labels of a number of rows."""
    kind = draw.one("head", "mse", "sparse", "two heads", "hinge", "cosine", "poisson", "binary")
    many = integers(rows, below=3, seed=5)
    vectors = numbers(rows, 2, seed=6)
    if kind == "sparse":
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
        return L.Dense(3, "softmax")(x), "sparse_categorical_crossentropy", metrics, many
    if kind == "binary":
        metrics = [keras.metrics.AUC(num_thresholds=11), "accuracy", keras.metrics.Recall()]
        loss = keras.losses.BinaryFocalCrossentropy()
        return L.Dense(1, "sigmoid")(x), loss, metrics, (many > 0).astype("float32")[:, None]
    if kind == "two heads":
        outputs = {"a": L.Dense(2, name="a")(x), "b": L.Dense(3, "softmax", name="b")(x)}
        losses = {"a": "mae", "b": "sparse_categorical_crossentropy"}
        return outputs, losses, {"a": ["mse"], "b": ["accuracy"]}, {"a": vectors, "b": many}
    if kind == "poisson":
        return L.Dense(2, "softplus")(x), "poisson", [keras.metrics.R2Score()], 1.0 + vectors
    loss = {
        "mse": keras.losses.MeanSquaredError(
            reduction=draw.one("reduction", "sum_over_batch_size", "sum", "mean_with_sample_weight")
        ),
        "hinge": "hinge",
        "cosine": keras.losses.CosineSimilarity(),
    }[kind]
    return L.Dense(2)(x), loss, ["mae", keras.metrics.RootMeanSquaredError()], vectors


def _optimizer(draw):
    kind = draw.one(
        "optimizer", *("SGD", "Momentum", "Adam", "AdamW", "RMSprop", "Adagrad", "Lion", "Nadam"),
        *("Adamax", "Adadelta", "Ftrl", "Adafactor", "Lamb", "Muon", "Schedule"),
    )  # fmt: skip
    options = {}
    clipping = draw.one("clip", "none", "clipnorm", "global_clipnorm", "clipvalue")
    if clipping != "none":
        options[clipping] = draw.number(0.05, 0.5)
    extra = draw.some("optimizer", 0.25, "ema", "accumulate", "decay", "scaled")
    if "ema" in extra:
        options |= {"use_ema": True, "ema_momentum": 0.8}
        if draw.some("ema", 0.5, "overwrite"):
            options["ema_overwrite_frequency"] = 3
    if "accumulate" in extra:
        options["gradient_accumulation_steps"] = 2
    if "decay" in extra:
        options["weight_decay"] = 0.01
    if "scaled" in extra:
        options["loss_scale_factor"] = 8.0
    rate = 0.01
    if kind == "Schedule":
        rate = keras.optimizers.schedules.CosineDecay(0.05, 6, warmup_target=0.1, warmup_steps=2)
    name = {"Momentum": "SGD", "Schedule": "SGD"}.get(kind, kind)
    if kind == "Momentum":
        options |= {"momentum": 0.8, "nesterov": True}
    made = getattr(keras.optimizers, name)(rate, **options)
    if "decay" in extra and draw.some("decay", 0.5, "excluded"):
        made.exclude_from_weight_decay(var_names=["bias", "embeddings"])
    return made


@keras.saving.register_keras_serializable("mixtures")
class Own(keras.Model):
    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weights)
            scaled = self.optimizer.scale_loss(loss)
        found = tape.gradient(scaled, self.trainable_variables)
        self.applied(found)
        y_pred = self(x, training=False)
        self._loss_tracker.update_state(loss, tf.shape(keras.tree.flatten(x)[0])[0])
        return self.compute_metrics(x, y, y_pred, weights)

    def applied(self, found):
        self.optimizer.apply(found, self.trainable_variables)


@keras.saving.register_keras_serializable("mixtures")
class Clipping(Own):
    def applied(self, found):
        clipped = [tf.clip_by_norm(tf.convert_to_tensor(one), 0.1) for one in found]
        self.optimizer.apply_gradients(zip(clipped, self.trainable_variables))


@keras.saving.register_keras_serializable("mixtures")
class Twice(Own):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


MODELS = {"keras": keras.Model, "own": Own, "clipping": Clipping, "twice": Twice}


class Halfway(keras.callbacks.Callback):
    """Changes the learning rate and a weight at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0 and isinstance(self.model.optimizer.learning_rate, keras.Variable):
            self.model.optimizer.learning_rate = 0.004


def _callbacks(draw, validates):
    watched = "val_loss" if validates else "loss"
    made = {
        "halfway": lambda: Halfway(),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau(watched, patience=0, min_delta=10.0),
        "stopping": lambda: keras.callbacks.EarlyStopping(
            watched, patience=0, min_delta=10.0, restore_best_weights=True
        ),
        "scheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        "swapped": lambda: keras.callbacks.SwapEMAWeights(),
        "nan": lambda: keras.callbacks.TerminateOnNaN(),
    }
    return [made[name]() for name in draw.some("callback", 0.2, *made)]


class _Batches(keras.utils.PyDataset):
    def __init__(self, parts, batch):
        super().__init__()
        self._parts, self._batch = parts, batch
        self._rows = len(keras.tree.flatten(parts)[0])

    def __len__(self):
        return -(-self._rows // self._batch)

    def __getitem__(self, index):
        own = slice(index * self._batch, (index + 1) * self._batch)
        return tuple(keras.tree.map_structure(lambda rows: rows[own], part) for part in self._parts)


def _fit(draw, place, model, x, y, weights, callbacks, validation):
    """Fits by one kind of data, and returns the logs."""
    kind = draw.one(f"data{place}", "arrays", "tf.data", "PyDataset", "generator", "dropped")
    batch = draw.number(4, 7, 8)
    options = {"epochs": draw.number(1, 2, 3), "verbose": 0, "shuffle": False}
    options |= {"callbacks": callbacks, "validation_data": validation}
    if validation is not None and draw.some(f"fit{place}", 0.3, "validation_freq"):
        options["validation_freq"] = 2
    if draw.some(f"fit{place}", 0.15, "initial_epoch"):
        options["initial_epoch"] = 1
        options["epochs"] += 1
    if getattr(y, "ndim", 0) == 1 and weights is None and draw.some("fit", 0.4, "class_weight"):
        options["class_weight"] = {0: 0.5, 1: 1.5, 2: 3.0}
    parts = (x, y) if weights is None else (x, y, weights)
    if kind == "arrays":
        if validation is None and draw.some(f"fit{place}", 0.3, "validation_split"):
            options["validation_split"] = 0.3
        return model.fit(x, y, batch_size=batch, sample_weight=weights, **options).history
    if kind == "PyDataset":
        return model.fit(_Batches(parts, batch), **options).history
    dataset = tf.data.Dataset.from_tensor_slices(parts)
    dataset = dataset.batch(batch, drop_remainder=kind == "dropped")
    if kind == "generator":
        made = _Batches(parts, batch)
        batches = [made[index] for index in range(len(made))]

        def forever():
            while True:
                yield from batches

        return model.fit(forever(), steps_per_epoch=len(batches), **options).history
    if draw.some(f"data{place}", 0.3, "repeated"):
        return model.fit(dataset.repeat(), steps_per_epoch=3, **options).history
    return model.fit(dataset, **options).history


def _options_of_strategy(draw):
    """Options that change nothing of what all-reduce computes."""
    kind = draw.one("options", *2 * ["none"], "buckets", "factors", "kept")
    strategy = tf.distribute.get_strategy()
    if type(strategy).__name__ != "MultiWorkerMirroredStrategy" or kind == "none":
        return contextlib.nullcontext()
    from tests.support.parts import swapped

    if kind == "buckets":
        return swapped(bucket_bytes=64)
    if kind == "kept":
        return swapped(reshard_after_forward=False)
    is_sharded = strategy._options.get("shard")
    return contextlib.nullcontext() if is_sharded else swapped(compression="factors")


def _program(names):
    seed, *without = names
    draw = Draw(int(seed), set(without))
    with _options_of_strategy(draw):
        return _trained(draw)


def _trained(draw):
    rows = draw.number(13, 20, 25)
    policy = draw.one("policy", "float32", "float32", "float32", "mixed_bfloat16")
    keras.config.set_dtype_policy(policy)
    kind, inputs, x = _body(draw)
    vectors = x
    outputs, loss, metrics, y = _heads(draw, x, rows)
    model = MODELS[draw.one("step", *3 * ["keras"], *MODELS)](inputs, outputs)
    keras.config.set_dtype_policy("float32")
    x = _rows(kind, rows)
    options = {draw.one("metrics", "metrics", "weighted_metrics"): metrics}
    extra = draw.some("compile", 0.2, "several", "eager", "weights")
    if "several" in extra:
        options["steps_per_execution"] = 2
    if "eager" in extra:
        options["run_eagerly"] = True
    if "weights" in extra and isinstance(loss, dict):
        options["loss_weights"] = {"a": 0.3, "b": 2.0}
    compiled(model, _optimizer(draw), loss, **options)
    weights = None
    if not isinstance(loss, dict) and draw.some("fit", 0.4, "sample_weight"):
        weights = numbers(rows, low=0.0, high=2.0, seed=9)
    few = keras.tree.map_structure(lambda one: one[:9], (x, y))
    validates = bool(draw.some("fit", 0.5, "validation"))
    found = {}

    def note(place, logs):
        for name, value in logs.items():
            # Names of layers count up in a process.
            found[f"{place}/{name.rstrip('_0123456789')}"] = np.asarray(value)

    callbacks = _callbacks(draw, validates)
    note("fit", _fit(draw, 0, model, x, y, weights, callbacks, few if validates else None))
    after = draw.one(
        *("then", "nothing", "again", "recompiled", "frozen", "rate", "on batch", "set"),
        *("saved", "weights file", "cloned", "headed"),
    )
    if after == "recompiled":
        compiled(model, keras.optimizers.Adam(0.01), loss, **options)
    elif after == "frozen":
        model.layers[-1].trainable = False
        compiled(model, keras.optimizers.SGD(0.01, momentum=0.5), loss, **options)
    elif after == "rate" and isinstance(model.optimizer.learning_rate, keras.Variable):
        model.optimizer.learning_rate = 0.002
    elif after == "set":
        model.set_weights([0.5 * value for value in model.get_weights()])
    elif after == "saved":
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            model = keras.models.load_model(f"{folder}/model.keras")
    elif after == "weights file":
        with tempfile.TemporaryDirectory() as folder:
            model.save_weights(f"{folder}/all.weights.h5")
            model.set_weights([0.5 * value for value in model.get_weights()])
            model.load_weights(f"{folder}/all.weights.h5")
    elif after == "cloned":
        own = keras.models.clone_model(model)
        own.set_weights(model.get_weights())
        model = compiled(own, keras.optimizers.Adam(0.01), loss, **options)
    elif after == "headed" and not isinstance(outputs, dict):
        model = keras.Model(inputs, L.Dense(outputs.shape[-1], "softmax")(vectors))
        compiled(model, keras.optimizers.RMSprop(0.01), "mse" if y.ndim > 1 else loss)
    if after == "on batch":
        logs = model.train_on_batch(*few, return_dict=True)
        note("batch", logs)
        note("tested", model.test_on_batch(*few, return_dict=True))
    elif after != "nothing":
        note("fit2", _fit(draw, 1, model, x, y, weights, [], None))
    note("evaluated", model.evaluate(*few, batch_size=4, verbose=0, return_dict=True))
    predicted = keras.tree.flatten(model.predict(few[0], batch_size=5, verbose=0))
    note("predicted", {chr(ord("a") + i): value for i, value in enumerate(predicted)})
    print("drawn:", *draw.taken)
    return model, found


if __name__ != "__main__":
    bundle("programs", TITLE, ("0",), _program, columns=(), saves=False)


def main():
    from tests.matrix import cells
    from tests.support import cluster

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-20", help="as 3 or 0-20")
    parser.add_argument("--columns", nargs="+", choices=[*COLUMNS, *LAYOUTS], default=list(COLUMNS))
    parser.add_argument("--without", nargs="+", default=[], help="choices that are left out")
    options = parser.parse_args()
    for name in options.columns:
        if name not in COLUMNS:
            COLUMNS[name] = Column(name, name, name)
    first, _, last = options.seeds.partition("-")
    for seed in range(int(first), int(last or first) + 1):
        names = (str(seed), *options.without)
        for column in options.columns:
            try:
                kind, error, text = cells._result(cells.BUNDLES[TITLE], names, column)
            except AssertionError as failure:  # Of plain Keras.
                print(seed, "does not train alone:", str(failure)[-300:], flush=True)
                break
            told = text if kind == "refused" or error > 1e9 else text[:200]
            print(f"{seed:4} {column:18} {kind:8} {error:.1e} {told}", flush=True)
    cluster.end_all()


if __name__ == "__main__":
    main()
