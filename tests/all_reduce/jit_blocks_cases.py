"""Models whose train steps are compiled in parts: `test_jit_blocks.py` says what they come to."""

import keras
import numpy as np
import tensorflow as tf

from tests.support.parts import swapped
from tests.support.traced import recorded

layers = keras.layers
PARTS = 3
BATCH, IDS = 8, 20


def mlp():
    """Connections around parts, losses of layers and of weights."""
    inputs = keras.Input((10,))
    first = h = layers.Dense(16, "relu", activity_regularizer="l1")(inputs)
    for _ in range(4):
        h = layers.Add()([layers.Dense(16, "tanh", kernel_regularizer="l2")(h), first])
    return keras.Model(inputs, layers.Dense(3)(h))


def transformer():
    """Masks from part to part."""
    inputs = keras.Input((6,), dtype="int32")
    h = layers.Embedding(IDS, 8, mask_zero=True)(inputs)
    for _ in range(2):
        h = layers.LayerNormalization()(layers.Add()([h, layers.MultiHeadAttention(2, 4)(h, h)]))
        h = layers.Add()([h, layers.Dense(8)(layers.Dense(16, "relu")(h))])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.inside = keras.Sequential([layers.Dense(12, "tanh"), layers.Dense(10)])

    def build(self, shape):
        self.inside.build(shape)

    def call(self, x):
        return x + self.inside(x)


class Encoder(layers.Layer):
    """Calls layers one after the other."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Own(keras.Model):
    """Calls layers itself, in a step of its own; two of them are units of another."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder([Block() for _ in range(2)])
        if tf.distribute.has_strategy():
            from keras_psplus import unit

            for block in self.encoder.blocks:
                unit(block)
        self.last = layers.Dense(3)

    def call(self, x):
        return self.last(self.encoder(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def trained(name, rows):
    """Trains a model, by the name of its function, and says what sums have waited for."""
    random, make = np.random.default_rng(0), globals()[name]
    y = random.integers(0, 3, rows)
    x = random.normal(size=(rows, 10)).astype("float32")
    if make is transformer:
        x = random.integers(0, IDS, (rows, 6))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with swapped(jit_blocks=PARTS), recorded() as functions:
        model = make()
        # Adam would scale up what is left of gradients that are zero, as of an attention's biases.
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss)
        logs = model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0).history
        if tf.distribute.has_strategy():
            logs |= waits(functions)
    return model, logs


def is_compiled(op):
    attribute = op.node_def.attr.get("f")
    if attribute is None or "PartitionedCall" not in op.type:
        return False
    definition = op.graph._get_function(attribute.func.name).cached_definition
    return definition.attr["_XlaMustCompile"].b


def waited_for(op):
    """Names of the compiled operations that an operation waits for, by data or control."""
    from keras_psplus.core.graph import called_functions

    found, seen, waiting = set(), set(), [(op, None)]
    while waiting:
        op, output = waiting.pop()
        if (op.name, output) in seen:
            continue
        seen.add((op.name, output))
        if is_compiled(op):
            found.add(op.name)
        inputs = range(len(op.inputs))
        if output is not None and op.type in ("If", "StatelessIf"):
            # TensorFlow runs a condition by parts: each output waits for its own inputs.
            is_needed = [output in called_functions.dependent_outputs(op, {i}) for i in inputs[1:]]
            inputs = [0, *(i for i, needed in enumerate(is_needed, 1) if needed)]
        waiting += [(op.inputs[i].op, op.inputs[i].value_index) for i in inputs]
        waiting += [(before, None) for before in op.control_inputs]
    return found


def waits(functions):
    """Numbers of parts of each traced step, and whether sums wait for each number of them."""
    parts, early = [], []
    for graph in {id(one.graph): one.graph for one in functions}.values():
        operations = graph.get_operations()
        compiled = [op.name for op in operations if is_compiled(op)]
        backward = {name for name in compiled if "backward" in graph_function(graph, name)}
        sums = [op for op in operations if op.type.startswith("Collective")]
        if backward and sums:
            found = {len(waited_for(op) & backward) for op in sums}
            parts.append(len(backward))
            early.append(found >= set(range(1, len(backward) + 1)))
    return {"parts": parts, "early": early}


def graph_function(graph, name):
    return graph.get_operation_by_name(name).node_def.attr["f"].func.name
