"""Models whose weights tensor parallelism cuts, in clusters and in one process."""

import contextlib
import math
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.sharding.cases import (
    BATCH,
    EPOCHS,
    OPTIMIZERS,
    ROWS,
    compiled,
    fit,
    left,
    numbers,
    wire_bytes,
)
from tests.sharding.unit_cases import each_unit_gathers
from tests.support.parts import swapped

L, O = keras.layers, keras.optimizers  # noqa: E741
COLUMN, ROW = (None, "model"), ("model", None)
LAYOUTS = {
    r".*up/kernel": COLUMN,
    r".*up/bias": ("model",),
    r".*down/kernel": ROW,
    r".*tokens/embeddings": ROW,
    r".*positions/embeddings": COLUMN,
    r".*(query|key|value)/kernel": (None, "model", None),
    r".*(query|key|value)/bias": ROW,
    r".*attention_output/kernel": ("model", None, None),
    r".*conv/kernel": (None, None, "model"),
    r"own_step.*/scales": COLUMN,
    r".*(recomputed|rows)/own": COLUMN,
    r".*lora_kernel_(a|b)": COLUMN,
    r".*parted(_1)?/first": COLUMN,
    r".*parted(_1)?/third": ROW,
}


def mlp(activation="tanh"):
    """Column and row cuts that meet, a softmax and a normalization that stand between two."""
    return keras.Sequential(
        [
            keras.Input((7,)),
            L.Dense(8, activation=activation, name="a_up"),
            L.Dense(6, name="a_down", kernel_regularizer="l2"),
            L.Dense(4, activation="softmax", name="b_up"),
            L.LayerNormalization(),
            L.Dense(8, name="c_up", use_bias=False, kernel_constraint="max_norm"),
            L.Activation("tanh"),
            L.Dense(3, name="c_down"),
        ]
    ), numbers(ROWS, 7)


def tokens():
    return np.random.RandomState(1).randint(0, 12, (ROWS, 6))


def transformer():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(12, 8, name="tokens")(inputs)
    x = x + L.Embedding(12, 8, name="positions")(inputs)
    attended = L.MultiHeadAttention(4, 2, name="attention")(x, x, use_causal_mask=True)
    x = L.LayerNormalization()(x + attended)
    y = L.Dense(8, name="ff_down")(L.Dense(16, activation="gelu", name="ff_up")(x))
    x = L.LayerNormalization()(x + y)
    outputs = L.Dense(4, name="head_up")(L.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), tokens()


def vocabulary():
    """Losses and metrics over classes that are cut: logits, smoothed ones, a softmax, ignored rows.

    Of the logits named `top`, a metric needs all.
    """
    inputs = keras.Input((6,), dtype="int32")
    table = L.ReversibleEmbedding(12, 8, name="tokens")
    x = L.LayerNormalization()(L.Dense(8, "tanh", name="v_up")(table(inputs)))
    mean = L.GlobalAveragePooling1D()(x)
    outputs = {
        "words": table(x, reverse=True),
        "smooth": L.Dense(4, name="smooth_up")(mean),
        "soft": L.Dense(10, "softmax", name="soft_up")(mean),
        "top": L.Dense(8, name="top_up")(mean),
    }
    model, sparse = keras.Model(inputs, outputs), keras.losses.SparseCategoricalCrossentropy
    losses = {
        "words": sparse(from_logits=True, ignore_class=0),
        "smooth": keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        "soft": "sparse_categorical_crossentropy",
        "top": sparse(from_logits=True),
    }
    top = keras.metrics.SparseTopKCategoricalAccuracy(2)
    metrics = {name: ["accuracy"] for name in losses} | {"top": ["accuracy", top]}
    model.compile(O.Adam(1e-2), losses, metrics=metrics, jit_compile=False)
    draw = np.random.RandomState(4).randint
    y = {"words": draw(0, 12, (ROWS, 6)), "smooth": np.eye(4)[draw(0, 4, ROWS)]}
    return model, tokens(), y | {"soft": draw(0, 10, ROWS), "top": draw(0, 8, ROWS)}


def of_vocabulary(epochs=EPOCHS):
    """Training and evaluation, and in a cluster the shapes that they gather."""
    with layouts(), collectives() as shapes:
        model, x, y = vocabulary()
        history = model.fit(x, y, BATCH, epochs=epochs, shuffle=False, verbose=0).history
        found = left(model, history)
        scores = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    found |= {f"evaluated/{name}": value for name, value in scores.items()}
    return found | ({"gathered": shapes["gather"]} if shapes else {})


@contextlib.contextmanager
def collectives():
    """Notes, without rows, the shapes of all parts that a row of workers gathers or sums."""
    if not tf.distribute.has_strategy():
        yield {}
        return
    from keras_psplus.tensor_parallel.group import ModelGroup

    shapes = {"gather": [], "reduce": []}

    def noted(name):
        call = getattr(ModelGroup, name)

        def method(group, local, *args):
            shapes[name].append(str(local.shape.as_list()[1:]))
            return call(group, local, *args)

        return method

    group = tf.distribute.get_strategy().extended.group
    with (
        mock.patch.multiple(ModelGroup, **{name: noted(name) for name in shapes}),
        mock.patch.object(group, "_has_noted", False),
    ):
        yield shapes


class OwnStep(keras.Model):
    """A model whose step clips by the norm of all gradients, and has a weight of its own.

    Its loss has slopes in it, of outputs by inputs and by a weight, in forward mode.
    """

    def __init__(self):
        super().__init__()
        # Tensors gathered for the softmax, and summed after it, are of one shape.
        self.first, self.second = L.Dense(6, "softmax", name="own_up"), L.Dense(3, name="own_down")
        self.scale = self.add_weight(name="scales", shape=(3, 4), initializer="ones")
        self.norm = keras.metrics.Mean("norm")

    def call(self, x):
        return self.second(self.first(x)) * keras.ops.mean(self.scale, axis=1)

    def train_step(self, data):
        x, y = data
        weight = self.first.kernel
        with tf.GradientTape() as tape:
            at, along = [x, weight._value], [tf.ones_like(x), tf.ones(weight.shape)]
            with tf.autodiff.ForwardAccumulator(at, along) as slopes:
                outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs) + tf.reduce_mean(slopes.jvp(outputs) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        grads, norm = tf.clip_by_global_norm(grads, 0.1)
        self.norm.update_state(norm)
        self.optimizer.apply(grads, self.trainable_variables)
        return {**self.compute_metrics(x, y, outputs), "loss": loss, "norm": self.norm.result()}


def own_step():
    model, x = OwnStep(), numbers(ROWS - 3, 7)
    model(x[:1])
    return model, x


class Rows(L.Layer):
    """Looks up as many tokens as each row has, in a layer's table and in one of its own."""

    def __init__(self):
        super().__init__(name="rows")
        self.table = L.Embedding(12, 8, name="tokens")

    def build(self, shape):
        self.table.build(shape)
        self.own = self.add_weight(name="own", shape=(12, 8))

    def compute_output_shape(self, shape):
        return (shape[0], 8)

    def call(self, x):
        ragged = tf.RaggedTensor.from_tensor(x, padding=0)
        of_layer = tf.reduce_sum(self.table(ragged), axis=1)
        own = tf.convert_to_tensor(self.own)
        return of_layer + tf.nn.embedding_lookup_sparse(own, tf.sparse.from_dense(x), None)


class Recomputed(L.Layer):
    """Has backward compute cut layers, and what a weight of its own is for, once more."""

    def __init__(self):
        super().__init__(name="recomputed")
        self.first, self.second = L.Dense(8, "tanh", name="in_up"), L.Dense(8, name="out_down")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)
        self.own = self.add_weight(name="own", shape=(8, 8))

    def call(self, x):
        return x + keras.remat(lambda x: self.second(self.first(x)) @ self.own)(x)


class Compiled(L.Dense):
    """A layer that has XLA compile its call."""

    @tf.function(jit_compile=True)
    def call(self, x):
        return super().call(x)


class Parted(L.Layer):
    """Has parts of a weight that is cut so, of one that is not cut, and of one cut otherwise."""

    def build(self, shape):
        self.first = self.add_weight(name="first", shape=(shape[-1], 8))
        self.second = self.add_weight(name="second", shape=(8, 6))
        self.third = self.add_weight(name="third", shape=(6, 6))

    def call(self, x):
        y = keras.ops.tanh(keras.ops.matmul(x, self.first))
        return keras.ops.matmul(keras.ops.tanh(keras.ops.matmul(y, self.second)), self.third)

    def call_in_parts(self, row, x):
        y = row.stack(keras.ops.tanh(row.enter(x) @ row.part(self.first, 1)), -1)
        y = keras.ops.tanh(row.sum(row.split(y, -1) @ row.part(self.second, 0)))
        return row.stack(row.enter(y) @ row.part(self.third, 1), -1)


def own_layer():
    layers = Parted(), L.Dense(8, "tanh", name="a_up"), Parted(), L.Dense(3)
    return keras.Sequential([keras.Input((7,)), *layers]), numbers(ROWS, 7)


def odd():
    """Rare uses of weights: ragged rows, functions for XLA, remat, LoRA."""
    inputs = keras.Input((6,), dtype="int32")
    x = L.Reshape((4, 2))(Recomputed()(Rows()(inputs)))
    x = L.Conv1D(8, 3, groups=2, padding="same", activation="tanh", name="conv")(x)
    layers = [L.EinsumDense("abc,cd->abd", (None, 8), name="folded_up")]
    layers += [L.Dense(8, "tanh", name="hidden_up")]
    for layer in layers:
        x = layer(x)
        layer.enable_lora(2)
    return keras.Model(
        inputs, Compiled(3, name="head_down")(L.GlobalAveragePooling1D()(x))
    ), tokens()


def tied():
    """Logits of the table that looks up, and layers that are frozen as they are made, or later."""
    inputs = keras.Input((6,), dtype="int32")
    table, later = L.ReversibleEmbedding(12, 8, name="tokens"), L.Dense(8, name="f_down")
    x = L.Dense(16, "gelu", name="f_up", trainable=False)(table(inputs))
    x = L.LayerNormalization()(L.Dense(8, "tanh", name="t_up")(later(x)))
    later.trainable = False
    return keras.Model(inputs, table(L.GlobalAveragePooling1D()(x), reverse=True)), tokens()


def one():
    """Fewer variables than workers, so that some own none."""
    return keras.Sequential([keras.Input((7,)), L.Dense(4, name="one_up")]), numbers(ROWS, 7)


MODELS = {make.__name__: make for make in (mlp, transformer, own_step, own_layer, odd, tied, one)}


@contextlib.contextmanager
def layouts():
    """Has the strategy cut weights as `LAYOUTS` says, in place of by itself."""
    if not tf.distribute.has_strategy():
        yield
        return
    import keras_psplus as psp
    from keras_psplus.tensor_parallel.plan import Layouts

    strategy = tf.distribute.get_strategy()
    rows = strategy.grid.rows
    found = psp.LayoutMap(psp.DeviceMesh((len(rows), len(rows[0])), ("batch", "model")))
    for pattern, axes in LAYOUTS.items():
        found[pattern] = axes
    with mock.patch.object(strategy, "layouts", Layouts(found, strategy.grid)):
        yield


def made(name, jit_compile=False):
    """Model and data of a case, `MODEL/OPTIMIZER`."""
    name, _, optimizer = name.partition("/")
    model, x = MODELS[name]()
    return compiled(model, OPTIMIZERS[optimizer or "adam"](), jit_compile, ["accuracy"]), x


def trained(name, jit_compile=False, policy=None, scale=1, **given):
    """Training of a case.

    Args:
        policy: Name of the layers' dtype policy.
        scale: Factor of inputs that are numbers.
        **given: Options of the strategy.
    """
    dtypes = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy or dtypes)
    try:
        return _trained(name, jit_compile, scale, given)
    finally:
        keras.config.set_dtype_policy(dtypes)


def _trained(name, jit_compile, scale, given):
    with (
        layouts(),
        swapped(**given) if given else contextlib.nullcontext(),
        names_compiled() if jit_compile else contextlib.nullcontext(),
    ):
        model, x = made(name, jit_compile)
        x = x * scale
        found = left(model, fit(model, x))
        if name.startswith("odd"):
            found["predicted"] = model.predict(x, batch_size=BATCH, verbose=0)
    return found


@contextlib.contextmanager
def names_compiled():
    """Has the log name the layers of functions that XLA compiles."""
    from keras_psplus.core.graph.compiled_calls import CompiledCalls

    make = CompiledCalls.function

    def function(self, function, layers, *args, **kwargs):
        found, layers = make(self, function, layers, *args, **kwargs), list(layers)
        if found is not None:
            print("compiled:", *(one.name for one in layers if getattr(one, "weights", ())))
        return found

    with mock.patch.object(CompiledCalls, "function", function):
        yield


def in_parts():
    """A transformer; sizes of what this worker keeps, and a traced step's collectives."""
    name = "transformer/momentum_clipnorm"
    if not tf.distribute.has_strategy():
        return trained(name)
    with layouts(), collectives() as shapes:
        model, x = made(name)
        found = left(model, fit(model, x))
    kept = [v for v in model.trainable_variables if hasattr(v._value, "local_shape")]
    slots = [v for v in model.optimizer.variables if hasattr(v._value, "part")]
    return found | {
        "kept": [v._value.part.shape.num_elements() for v in kept + slots],
        "whole": [np.prod(v.shape) for v in kept + slots],
        "slots of a weight": len(slots) / len(kept),
        "gathered": shapes["gather"],
        "summed": len(shapes["reduce"]),
    }


def in_pieces():
    """Training under a loss scale; sizes of parts of weights, and of what is kept of each."""
    with layouts():
        model, x = made("mlp/loss_scale")
        found = left(model, fit(model, x))
    if not tf.distribute.has_strategy():
        return found
    inner, weights = model.optimizer.inner_optimizer, model.trainable_variables
    kept = {"weights": weights, "first": inner._momentums, "second": inner._velocities}
    for name, variables in kept.items():
        parts = [getattr(v._value, "part", v._value) for v in variables]
        found[f"kept/{name}"] = [part.shape.num_elements() for part in parts]
    return found | {"parts": [np.prod(getattr(v._value, "local_shape", v.shape)) for v in weights]}


def on_links(optimizer, width=64, rows=8):
    """Bytes of a step on this worker's connections, as the kernel and as the library counts them.

    Beside these, what the formula of docs/tensor_parallel.md says for columns and for rows.
    """
    from keras_psplus.cluster.monitor.step_times import _connections

    def sent():
        return sum(acked for acked, _ in _connections().values())

    with layouts(), collectives() as shapes, each_unit_gathers():
        sizes = {"a_up": 4 * width, "a_down": width, "b_up": 4 * width, "b_down": 4}
        layers = [L.Dense(size, "tanh", name=name) for name, size in sizes.items()]
        model = keras.Sequential([keras.Input((width,)), *layers])
        compiled(model, OPTIMIZERS[optimizer]())
        # Traces, and begins connections.
        fit(model, numbers(2 * rows, width), batch_size=rows, epochs=1)
        before, counted = sent(), wire_bytes()
        fit(model, numbers(20 * rows, width), batch_size=rows, epochs=1)
        wire, counted = (sent() - before) / 20, (wire_bytes() - counted) / 20
    # Of two workers, each sends as many bytes as a sum has; a row has half of the batch.
    along_rows = sum(int(one.strip("[]")) for one in shapes["reduce"]) * rows / 2
    strategy, weights = tf.distribute.get_strategy(), model.trainable_variables
    pieces = [math.prod(one._value.part.shape) for one in weights]
    # In backward, of units but the last, whose kernels are still there.
    gathered, wholes, workers = sum(pieces) + sum(pieces[:-2:2]), 0, strategy.num_workers
    for weight, place in zip(weights, strategy.engine.plan_of(model.optimizer).places):
        if place.owner is not None:
            wholes += math.prod(weight.shape)
            if place.owner % 2 == strategy.extended.world.rank:
                # The owner's row gathers it for the update.
                along_rows += math.prod(getattr(weight._value, "local_shape", ()) or (0,))
    # Of weights with owners, gradients, new values and the pieces for these; of others, gradients.
    updated = 2 * wholes * (workers - 1) / workers + sum(pieces)
    return {
        "own_wire": wire,
        "own_counted": counted,
        "own_columns": 4 * (gathered + updated),
        "own_rows": 4 * along_rows,
    }


def in_units(**given):
    """Two pairs of a column and a row cut, each a unit; a traced step's collectives, and bytes."""
    with layouts(), swapped(**given), collectives() as shapes, each_unit_gathers():
        sizes = {"a_up": 16, "a_down": 6, "b_up": 8, "b_down": 3}
        layers = [L.Dense(size, "tanh", name=name) for name, size in sizes.items()]
        model = compiled(keras.Sequential([keras.Input((7,)), *layers]), O.SGD(0.05))
        before = wire_bytes()
        found = left(model, fit(model, numbers(2 * BATCH, 7), epochs=1))
        wire = (wire_bytes() - before) / 2
    if not tf.distribute.has_strategy():
        return found
    pieces = [math.prod(one._value.part.shape) for one in model.trainable_variables]
    gathered, summed = shapes["gather"], shapes["reduce"]
    return found | {"pieces": pieces, "wire": wire, "gathered": gathered, "summed": summed}
