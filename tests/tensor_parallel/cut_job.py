"""Trains with weights cut along a mesh, or in one process.

cut_job.py FOLDER CASE,CASE...

The mesh is `MODEL` (environment) workers wide, as many rows high as there are workers for. What
each case leaves is written to `<folder>/<case>.<task>.npz`.
"""

import contextlib
import json
import os
import pathlib
import sys
import traceback

from tests import quick_start, references  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.core.graph.compiled_calls import CompiledCalls
from keras_psplus.tensor_parallel.group import ModelGroup
from tests.sharding.shares_job import JIT, Dying

L, O = keras.layers, keras.optimizers  # noqa: E741
EPOCHS, ROWS = 2, 80  # of 8: 20 steps
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
    r".*lstm/lstm_cell/.*kernel": COLUMN,
    r"own_step.*/scales": COLUMN,
    r".*(recomputed|rows)/own": COLUMN,
    r".*lora_kernel_(a|b)": COLUMN,
    # KerasHub's own layers.
    r"token_embedding/embeddings": ROW,
    r".*feedforward_intermediate_dense/kernel": COLUMN,
    r".*feedforward_output_dense/kernel": ROW,
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
    ), np.random.RandomState(1).randn(ROWS, 7).astype("float32")


def table():
    """Tables cut by vocabulary and by width, whose rows a batch looks up several times."""
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(12, 8, name="tokens")(inputs) + L.Embedding(12, 8, name="positions")(inputs)
    x = L.Dense(8, activation="tanh", name="up")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3, name="down")(x)), tokens()


def tokens(length=6, vocabulary=12):
    return np.random.RandomState(1).randint(0, vocabulary, (ROWS, length))


def transformer(attention=L.MultiHeadAttention, dropout=0.0, **kwargs):
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(12, 8, name="tokens")(inputs)
    x = x + L.Embedding(12, 8, name="positions")(inputs)
    for i in range(2):
        heads = kwargs or {"num_heads": 4, "key_dim": 2}
        attended = attention(**heads, dropout=dropout, name=f"attention_{i}")(
            x, x, use_causal_mask=True
        )
        x = L.LayerNormalization()(x + L.Dropout(dropout)(attended))
        y = L.Dense(16, activation="gelu", name=f"ff_{i}_up")(x)
        y = L.Dense(8, name=f"ff_{i}_down")(y)
        x = L.LayerNormalization()(x + y)
    outputs = L.Dense(4, name="head_up")(L.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), tokens()


def mixed():
    """Layers without a rule, whose weights are gathered, and recurrent ones."""
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(12, 8, name="tokens")(inputs)
    x = L.Conv1D(8, 3, activation="tanh", padding="same", name="conv")(x)
    x = L.BatchNormalization(synchronized=True)(x)
    x = L.LSTM(4, name="lstm", return_sequences=True)(x)
    x = L.TimeDistributed(L.Dense(4, name="t_up"))(x)
    return keras.Model(inputs, L.Dense(3, name="head_down")(L.Flatten()(x))), tokens()


def grouped():
    """Grouped queries, dropout, and the table of tokens for logits, too."""
    inputs = keras.Input((6,), dtype="int32")
    table = L.ReversibleEmbedding(12, 8, name="tokens")
    x = table(inputs)
    attention = L.GroupQueryAttention(2, 4, 2, name="attention")
    x = L.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    x = L.Dropout(0.3)(L.Dense(8, activation="relu", name="in_up")(x))
    x = L.GlobalAveragePooling1D()(L.Dense(8, name="in_down")(x))
    return keras.Model(inputs, table(x, reverse=True)), tokens()


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
    model.compile(O.Adam(1e-2), losses, metrics=metrics)
    draw = np.random.RandomState(4).randint
    y = {"words": draw(0, 12, (ROWS, 6)), "smooth": np.eye(4)[draw(0, 4, ROWS)]}
    return model, tokens(), y | {"soft": draw(0, 10, ROWS), "top": draw(0, 8, ROWS)}


def of_vocabulary(epochs=EPOCHS):
    keras.utils.set_random_seed(3)
    model, x, y = vocabulary()
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history
    found = left(model, history)
    scores = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    return found | {f"evaluated/{name}": np.asarray(value) for name, value in scores.items()}


def logits():
    """Shapes of what is gathered in traced steps of training and of evaluation."""
    shapes = gathered_shapes()
    of_vocabulary(epochs=1)
    return {"gathered": np.asarray(shapes)}


def gathered_shapes():
    """List to which each gathering adds the shape of its parts, without rows."""
    shapes, gather = [], ModelGroup.gather

    def noted(group, local, axis):
        shapes.append(str(local.shape.as_list()[1:]))
        return gather(group, local, axis)

    ModelGroup.gather = noted
    return shapes


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
    model, x = OwnStep(), np.random.RandomState(1).randn(ROWS - 3, 7).astype("float32")
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


def gpt2():
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=12,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
        max_sequence_length=6,
    )
    return of_backbone(backbone, ["token_ids", "padding_mask"])


def bert():
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=12,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
        max_sequence_length=6,
    )
    return of_backbone(backbone, ["token_ids", "padding_mask", "segment_ids"])


def of_backbone(backbone, names):
    outputs = backbone.output
    outputs = outputs["sequence_output"] if isinstance(outputs, dict) else outputs
    logits = L.Dense(3, name="classes")(L.GlobalAveragePooling1D()(outputs))
    data = {name: np.ones((ROWS, 6), "int32") for name in names}
    data["token_ids"] = tokens()
    if "segment_ids" in names:
        data["segment_ids"] = np.zeros((ROWS, 6), "int32")
    return keras.Model(backbone.input, logits), data


def mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return mlp()
    finally:
        keras.config.set_dtype_policy("float32")


MODELS = {
    "mlp": mlp,
    "table": table,
    "transformer": transformer,
    "mixed": mixed,
    "grouped": grouped,
    "own_step": own_step,
    "odd": odd,
    "gpt2": gpt2,
    "bert": bert,
    "bfloat16": mixed_precision,
}


def adamw():
    optimizer = O.AdamW(1e-2, weight_decay=0.05, global_clipnorm=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "adam": lambda: O.Adam(1e-2),
    "sgd": lambda: O.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.1),
    "adamw": adamw,
    "adam_clipvalue": lambda: O.Adam(1e-2, amsgrad=True, clipvalue=0.01),
    "average": lambda: O.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulate": lambda: O.Adagrad(1e-2, gradient_accumulation_steps=2, use_ema=True),
    "schedule_free": lambda: O.ScheduleFreeAdamW(1e-2, warmup_steps=3),
    "loss_scale": lambda: O.LossScaleOptimizer(
        O.Adam(1e-2, global_clipnorm=1.0), initial_scale=256.0, dynamic_growth_steps=3
    ),
    "muon": lambda: O.Muon(1e-2, global_clipnorm=0.5, weight_decay=0.1, use_ema=True),
    "adafactor": lambda: O.Adafactor(1e-2),
    "lamb": lambda: O.Lamb(1e-2, clipnorm=0.1),
    "lamb_accumulate": lambda: O.Lamb(1e-2, gradient_accumulation_steps=3),
}


def compiled(model, optimizer="adam"):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"], jit_compile=JIT)
    return model


def fit(model, x, epochs=EPOCHS, **kwargs):
    rows = len(x["token_ids"] if isinstance(x, dict) else x)
    y = np.random.RandomState(2).randint(0, 3, rows)
    options = dict(batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model.fit(x, y, **options | kwargs).history


def left(model, history):
    return (
        {f"history/{name}": np.asarray(values) for name, values in history.items()}
        | {f"weights/{v.path}": v.numpy() for v in model.variables}
        | {f"slots/{v.path}": v.numpy() for v in model.optimizer.variables}
    )


def trained(case):
    name, _, optimizer = case.partition("/")
    model, x = made(name, optimizer)
    found = left(model, fit(model, x))
    found["predicted"] = model.predict(x, batch_size=8, verbose=0)
    return found


def made(name, optimizer):
    keras.utils.set_random_seed(3)
    model, x = MODELS[name]()
    compiled(model, optimizer or "adam")
    # By `fit`, Keras builds it in a trace, where the first values of ScheduleFreeAdamW are lost.
    model.optimizer.build(model.trainable_variables)
    return model, x


def files(folder, task, is_chief):
    """Files of all workers, and of the chief alone."""
    model, x = made("mlp", "average")
    fit(model, x, epochs=1)
    model.save(folder / f"all.{task}.keras")
    if is_chief:
        model.save_weights(folder / "alone.weights.h5")
    return left(model, fit(model, x, epochs=1))


def loaded():
    """Goes on from a file that another number of workers has written."""
    model = keras.models.load_model(os.environ["LOADED"])
    _, x = mlp()
    return left(model, fit(model, x, epochs=1))


def backup(folder, dies):
    model, x = made("mlp", "adam")
    callbacks = [keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)]
    history = fit(model, x, callbacks=[*callbacks, Dying(dies, 1, 2)])
    return {k: v for k, v in left(model, history).items() if not k.startswith("history")}


def parts():
    """Sizes of what this worker keeps, and the collectives that a traced step has."""
    sums, reduce, shapes = [], ModelGroup.reduce, gathered_shapes()
    ModelGroup.reduce = lambda *args: sums.append(1) or reduce(*args)
    model, x = made("transformer", "adam")
    fit(model, x, epochs=1)
    kept = [v for v in model.trainable_variables if hasattr(v._value, "local_shape")]
    slots = [v for v in model.optimizer.variables if hasattr(v._value, "part")]
    return {
        "kept": np.asarray([v._value.part.shape.num_elements() for v in kept + slots]),
        "whole": np.asarray([np.prod(v.shape) for v in kept + slots]),
        "slots": np.asarray(len(slots) / len(kept)),
        "gathered": np.asarray(shapes),
        "summed": np.asarray(len(sums)),
    }


def show_compiled_layers():
    """Has the log name the layers of functions that XLA compiles."""
    make = CompiledCalls.function

    def function(self, function, layers, *args, **kwargs):
        found, layers = make(self, function, layers, *args, **kwargs), list(layers)
        if found is not None:
            print("compiled:", *(one.name for one in layers if getattr(one, "weights", ())))
        return found

    CompiledCalls.function = function


def main(folder, cases):
    folder, strategy, task = pathlib.Path(folder), None, "one"
    show_compiled_layers()
    if "TF_CONFIG" in os.environ:
        model = int(os.environ.get("MODEL", "2"))
        workers = int(os.environ["WORKERS"])
        mesh = psp.DeviceMesh((workers // model, model), ("batch", "model"))
        options = {"compression": "bf16"} if "COMPRESSION" in os.environ else {}
        if "TOPOLOGY" in os.environ:
            options["topology"] = json.loads(os.environ["TOPOLOGY"])
        strategy = psp.ModelParallelStrategy(layout_map=LAYOUTS, mesh=mesh, **options)
        task = strategy.task.name
    else:
        references.build_first()
    others = {
        "files": lambda: files(folder, task, strategy is None or strategy.is_chief),
        "load": loaded,
        "dying": lambda: backup(folder, task == os.environ["VICTIM"]),
        "resumed": lambda: backup(folder, False),
        "parts": parts,
        "vocabulary": of_vocabulary,
        "logits": logits,
    }
    for case in cases.split(","):
        keras.backend.clear_session()
        try:
            with strategy.scope() if strategy else contextlib.nullcontext():
                found = others[case]() if case in others else trained(case)
        except Exception:
            if case == "dying":
                raise
            # Its test finds no file, and shows this; other cases go on.
            traceback.print_exc()
            continue
        np.savez(folder / f"{case.replace('/', '_')}.{task}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
