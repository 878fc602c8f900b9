"""Trains with weights cut along a mesh, or in one process.

cut_job.py FOLDER CASE,CASE...

The mesh is `MODEL` (environment) workers wide, as many rows high as there are workers for. What
each case leaves is written to `<folder>/<case>.<task>.npz`.
"""

import contextlib
import os
import pathlib
import sys
import traceback

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp

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
}


def mlp(activation="tanh"):
    """Column and row cuts that meet, a softmax and a normalization that stand between two."""
    return keras.Sequential(
        [
            keras.Input((7,)),
            L.Dense(8, activation=activation, name="a_up"),
            L.Dense(6, name="a_down"),
            L.Dense(4, activation="softmax", name="b_up"),
            L.LayerNormalization(),
            L.Dense(8, name="c_up", use_bias=False),
            L.Activation("tanh"),
            L.Dense(3, name="c_down"),
        ]
    ), np.random.RandomState(1).randn(ROWS, 7).astype("float32")


def tokens(length=6, vocabulary=12):
    return np.random.RandomState(1).randint(0, vocabulary, (ROWS, length))


def transformer(attention=L.MultiHeadAttention, dropout=0.0, **kwargs):
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(12, 8, name="tokens")(inputs)
    x = x + L.Embedding(6, 8, name="positions")(keras.ops.arange(6))
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


MODELS = {
    "mlp": mlp,
    "transformer": transformer,
    "mixed": mixed,
}
OPTIMIZERS = {
    "adam": lambda: O.Adam(1e-2),
}


def compiled(model, optimizer="adam"):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"])
    return model


def fit(model, x, epochs=EPOCHS, **kwargs):
    y = np.random.RandomState(2).randint(0, 3, len(x))
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
    keras.utils.set_random_seed(3)
    model, x = MODELS[name]()
    compiled(model, optimizer or "adam")
    model.optimizer.build(model.trainable_variables)
    found = left(model, fit(model, x))
    found["predicted"] = model.predict(x, batch_size=8, verbose=0)
    return found


def main(folder, cases):
    folder, strategy, task = pathlib.Path(folder), None, "one"
    if "TF_CONFIG" in os.environ:
        model = int(os.environ.get("MODEL", "2"))
        workers = int(os.environ["WORKERS"])
        mesh = psp.DeviceMesh((workers // model, model), ("batch", "model"))
        strategy = psp.ModelParallelStrategy(layout_map=LAYOUTS, mesh=mesh)
        task = strategy.task.name
    for case in cases.split(","):
        keras.backend.clear_session()
        try:
            with strategy.scope() if strategy else contextlib.nullcontext():
                found = trained(case)
        except Exception:
            # Its test finds no file, and shows this; other cases go on.
            traceback.print_exc()
            continue
        np.savez(folder / f"{case.replace('/', '_')}.{task}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
