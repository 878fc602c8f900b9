"""Two workers whose train steps are compiled in parts, beside one compiled process.

jit_blocks_job.py FOLDER

Each worker writes what it has found to `<folder>/<task>.json`. The chief also trains alone.
"""

import json
import pathlib
import sys

from tests import quick_start, references  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.core.graph import called_functions
from tests.gpu.steps_job import recorded

layers = keras.layers
PARTS = 3
# The last batch has one row, and one replica has none.
ROWS, BATCH, IDS = 25, 8, 20


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
        self.encoder = Encoder([psp.unit(Block()) for _ in range(2)])
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


def data_of(make):
    random = np.random.default_rng(0)
    y = random.integers(0, 3, ROWS)
    if make is transformer:
        return random.integers(0, IDS, (ROWS, 6)), y
    return random.normal(size=(ROWS, 10)).astype("float32"), y


def trained(make, jit_compile):
    keras.utils.set_random_seed(1)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam would scale up what is left of gradients that are zero, as of an attention's key biases.
    model.compile(keras.optimizers.SGD(0.1, 0.9), loss, jit_compile=jit_compile)
    logs = model.fit(*data_of(make), BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"logs": logs, "weights": [w.tolist() for w in model.get_weights()]}


def is_compiled(op):
    attribute = op.node_def.attr.get("f")
    if attribute is None or "PartitionedCall" not in op.type:
        return False
    definition = op.graph._get_function(attribute.func.name).cached_definition
    return definition.attr["_XlaMustCompile"].b


def waited_for(op):
    """Names of the compiled operations that an operation waits for, by data or control."""
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
    """Numbers of parts of backprop that sums wait for, of each traced step of several parts."""
    steps = []
    for graph in {id(one.graph): one.graph for one in functions}.values():
        operations = graph.get_operations()
        compiled = [op.name for op in operations if is_compiled(op)]
        backward = {name for name in compiled if "backward" in graph_function(graph, name)}
        sums = [op for op in operations if op.type.startswith("Collective")]
        if backward and sums:
            found = {len(waited_for(op) & backward) for op in sums}
            steps.append({"parts": len(backward), "waits": sorted(found)})
    return steps


def graph_function(graph, name):
    return graph.get_operation_by_name(name).node_def.attr["f"].func.name


def main(folder):
    references.build_first()
    strategy = psp.MultiWorkerMirroredStrategy(jit_blocks=PARTS)
    results = {}
    for make in (mlp, transformer, Own):
        if strategy.is_chief:
            with psp.single_process():
                results[f"{make.__name__} alone"] = trained(make, True)
        with strategy.scope(), recorded() as functions:
            results[make.__name__] = trained(make, "auto")
        results[f"{make.__name__} waits"] = waits(functions)
    pathlib.Path(folder, f"{strategy.task.name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
