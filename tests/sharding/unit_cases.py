"""Models whose layers are units of weights in shares, in clusters and in one process."""

import contextlib
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.sharding.cases import BATCH, ROWS, compiled, fit, left, numbers
from tests.support.parts import swapped

L, O = keras.layers, keras.optimizers  # noqa: E741


def unit(layer):
    """A layer as a unit; in plain Keras, the layer."""
    if not tf.distribute.has_strategy():
        return layer
    import keras_psplus as psp

    return psp.unit(layer)


class Block(L.Layer):
    """A block of a transformer, which is one unit; with weights of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention, self.norm = L.MultiHeadAttention(2, 4), L.LayerNormalization()
        self.inside, self.outside = L.Dense(12, activation="gelu"), L.Dense(8)
        self.supports_masking = True

    def build(self, shape):
        self.scale = self.add_weight(shape=(8,), initializer="ones", name="scale")
        self.attention.build(shape, shape)
        self.norm.build(shape)
        self.inside.build(shape)
        self.outside.build((*shape[:-1], 12))

    def call(self, x, mask=None):
        x = x + self.attention(x, x, query_mask=mask) * self.scale
        return self.norm(x + self.outside(self.inside(x)))


class Encoder(L.Layer):
    """A layer with a weight of its own, whose blocks are units."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [unit(Block())]
        self.last = L.Dense(8)

    def build(self, shape):
        self.positions = self.add_weight(shape=shape[1:], name="positions")
        for layer in (*self.blocks, self.last):
            layer.build(shape)

    def call(self, x):
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def encoder():
    inputs = keras.Input((6,), dtype="int32")
    x = Encoder()(L.Embedding(11, 8)(inputs))
    last = unit(keras.Sequential([L.Dense(5, activation="tanh"), L.Dense(3)]))
    return keras.Model(inputs, last(L.GlobalAveragePooling1D()(x)))


class Compiled(L.Dense):
    """A layer that has XLA compile its call."""

    @tf.function(jit_compile=True)
    def call(self, x):
        return super().call(x)


class Repeating(keras.Model):
    """A model whose step predicts before, between and after updates in a loop and a branch."""

    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return 0

    def train_step(self, data):
        x, y = data
        self.optimizer.build(self.trainable_variables)
        first = self.compute_loss(y=y, y_pred=self(x))
        tf.while_loop(lambda i: i < 2, lambda i: i + 1 + self.update(x, y), (0,))
        # The branch that is traced last only predicts.
        is_even = self.optimizer.iterations.value % 2 == 0
        tf.cond(is_even, lambda: self.update(x, y), lambda: tf.cast(self(x)[0, 0] > 2, tf.int32))
        last = self(x)
        logs = self.compute_metrics(x, y, last)
        return {**logs, "first": first, "loss": self.compute_loss(y=y, y_pred=last)}


def repeating():
    inputs = keras.Input((7,))
    return Repeating(inputs, L.Dense(3)(L.Dense(5, activation="tanh")(inputs)))


class Writing(L.Layer):
    """Computes with its weight before and after it has changed it."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")

    def call(self, x, training=False):
        x = x * self.scale
        if training:
            self.scale.assign(self.scale * 0.9)
        return x * self.scale


class Branching(keras.Model):
    """A model with a function of its own, of layers that change weights and are in branches."""

    def __init__(self):
        super().__init__()
        self.normal = L.SpectralNormalization(L.Dense(5, activation="tanh"))
        self.writing, self.left, self.right = Writing(), L.Dense(4, activation="tanh"), L.Dense(3)
        self.other = L.Dense(3)

    @tf.function
    def call(self, x, training=False):
        x = self.writing(self.normal(x, training=training), training=training)
        is_left = tf.shape(x)[1] == 5
        return tf.cond(is_left, lambda: self.right(self.left(x)), lambda: self.other(x))


def branching():
    model = Branching()
    model(np.zeros((1, 7), "float32"))
    return model


class Recomputed(L.Dense):
    """A layer whose activations, and with them its weights, backward computes once more."""

    def call(self, x):
        return keras.remat(super().call)(x)


class Recomputing(L.Layer):
    """A layer with a skip connection, whose inner layer and model backward calls once more."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = keras.Sequential([L.Dense(8, activation="tanh")]), L.Dense(6)

    def build(self, shape):
        self.inside.build(shape)
        self.outside.build((*shape[:-1], 8))

    def call(self, x):
        return x + keras.remat(lambda inputs: self.outside(self.inside(inputs)))(x)


class Differentiating(L.Dense):
    """A layer that asks for the gradient of its own weights, of which its output is independent."""

    def call(self, x):
        with tf.GradientTape() as tape:
            y = super().call(x)
            total = tf.reduce_sum(y**2)
        return y + 0.0 * tf.reduce_mean(tape.gradient(total, [self.kernel._value])[0])


class Several(keras.Model):
    """A model whose step asks one tape for gradients twice."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
            penalty = tf.reduce_mean(y_pred**2)
        pairs = [tape.gradient(one, self.trainable_variables) for one in (loss, penalty)]
        self.optimizer.apply([a + 0.1 * b for a, b in zip(*pairs)], self.trainable_variables)
        return self.compute_metrics(x, y, y_pred) | {"loss": loss}


def several():
    layers = [L.Dense(6, activation="tanh"), Recomputed(6, activation="tanh"), Recomputing()]
    layers += [Differentiating(6, activation="tanh"), Compiled(5, activation="tanh"), L.Dense(3)]
    inputs = x = keras.Input((7,))
    for layer in layers:
        x = layer(x)
    # Of its kernel, the gradient needs no value, but of two factors that are added to it.
    layers[0].enable_lora(2)
    return Several(inputs, x)


MODELS = {one.__name__: one for one in (encoder, branching, repeating, several)}


def trained(name, jit_compile=False, **given):
    """A model that was trained, and of some evaluation and predictions."""
    with swapped(**given), each_unit_gathers() if jit_compile else contextlib.nullcontext():
        model = compiled(MODELS[name](), O.SGD(0.05, momentum=0.9), jit_compile)
        x = numbers(ROWS, 7)
        if name == "encoder":
            x = np.random.RandomState(1).randint(0, 7, (ROWS, 6))
        initial = model.get_weights()
        if name != "branching":
            found = left(model, fit(model, x))
        else:
            y = np.random.RandomState(2).randint(0, 3, 9)
            found = left(model, fit(model, x, validation_data=(x[:9], y)))
            found["predicted"] = model.predict(x, batch_size=8, verbose=0)
    return found | {f"initial/{i}": value for i, value in enumerate(initial)}


def each_unit_gathers():
    """Has no units gathered with others, as small ones are."""
    if not tf.distribute.has_strategy():
        return contextlib.nullcontext()
    from keras_psplus.sharding import units

    return mock.patch.object(units, "_GROUP_BYTES", 1)


class Pair(L.Layer):
    """Two units in a layer."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = unit(first), unit(second)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], self.first.units))

    def call(self, x):
        return self.second(self.first(x))


def units(jit_compile, **given):
    """Parts, bytes and gatherings of a step; and reads while others change weights."""
    from keras_psplus.sharding import units

    calls, steps, found = [], [], {"functions": 0}

    def sizes_of_groups():
        return [len(group) for step in steps for group in step.groups]

    def first_of(call, i):
        """Tensors of a weight that forward gathers, and that functions of XLA return of it."""
        whole, outputs = call.wholes[i], []
        for function in call.functions:
            found["functions"] += 1
            pairs = zip(function.operation.outputs, function._graph.outputs)
            outputs += [one for one, own in pairs if own is function.captures.get(id(whole))]
        return [whole, *outputs]

    class Call(units.UnitCall):
        def __init__(self, *args):
            super().__init__(*args)
            calls.append(self)

    class Step(units.StepCalls):
        def __init__(self):
            super().__init__()
            steps.append(self)

    class Backward(units.Backward):
        def redirect(self):
            super().redirect()
            if not self._replacements:
                return
            own = [call for call in calls if call.graph is self._graph]
            later = {op.name for op in self._graph.get_operations()[self._replacements[0][0] :]}
            again = [
                (call, i)
                for call in own
                for i, weight in enumerate(call.weights)
                if id(weight) in self.found[id(call)]
            ]
            first = [tensor for call, i in again for tensor in first_of(call, i)]
            users = {op.name for tensor in first for op in tensor.consumers()}
            names = [call.weights[i].path.rpartition("/")[2] for call, i in again]
            found.update(forward=len(own), backward=names, left=len(later & users))

    watched = {"UnitCall": Call, "StepCalls": Step, "Backward": Backward}
    with swapped(**given), mock.patch.multiple(units, **watched):
        x = numbers(2 * BATCH, 7)
        if not given:
            layers = [keras.Input((7,)), *(L.Dense(6) for _ in range(5))]
            fit(compiled(keras.Sequential(layers), O.SGD(0.1), jit_compile), x, epochs=1)
        found["together"] = sizes_of_groups()
        steps.clear()
        with mock.patch.object(units, "_GROUP_BYTES", 1 << 12):
            large = of_large_units(x, jit_compile)
    return found | large | {"apart": sizes_of_groups()}


def of_large_units(x, jit_compile):
    """Bytes of a step and sizes of parts; and reads of a weight while others change some."""
    strategy = tf.distribute.get_strategy()
    layers = [L.Dense(80, activation="tanh") for _ in range(3)]
    nested = unit(keras.Sequential([layers[2], L.Dense(3)]))
    model = keras.Sequential([keras.Input((7,)), Pair(*layers[:2]), nested])
    compiled(model, O.SGD(0.1), jit_compile)
    before = strategy.communication.wire_bytes
    fit(model, x, epochs=1)
    wire = strategy.communication.wire_bytes - before
    weights = model.trainable_variables
    for weight in weights:
        # The chief is ahead, and reads what the other has still to read and change.
        time.sleep(0 if strategy.is_chief else 0.03)
        weight.assign(weight.numpy() * 0.5)
    alone = layers[0].kernel.numpy().sum() if strategy.is_chief else None
    both = layers[0].kernel.numpy().sum()
    return {
        "wire": wire / 2,
        "kept": [one._value.part.shape.num_elements() for one in weights],
        "whole": [np.prod(one.shape) for one in weights],
        "read": both,
        "read alone": both if alone is None else alone,
    }
