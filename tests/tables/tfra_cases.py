"""A model of TFRA's that goes on in Keras 3: what `tfra/make.py` has written, and trains."""

import pathlib

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

TFRA = pathlib.Path(__file__).with_name("tfra")
NAMES = "user", "items"


def after():
    """Data, and what TFRA has predicted and lost."""
    return dict(np.load(TFRA / "after.npz"))


def build():
    """The model, compiled, without rows."""
    ids = {name: keras.Input((n,), dtype="int64", name=name) for name, n in zip(NAMES, (1, 3))}
    tables = [psp.layers.DynamicEmbedding(4, combiner="mean", name=f"{one}_table") for one in NAMES]
    parts = [table(one) for table, one in zip(tables, ids.values())]
    outputs = keras.layers.Dense(1, name="out")(keras.layers.Concatenate()(parts))
    model = keras.Model(ids, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model, tables


def move(path, model, tables):
    """Has the model what is in a checkpoint of TFRA's."""
    for name, table in zip(NAMES, tables):
        psp.tables.import_tfra(table, path, f"{name}_embedding-parameter", batch=7)
    reader = tf.train.load_checkpoint(path)
    model.optimizer.iterations.assign(
        reader.get_tensor("optimizer/iter/.ATTRIBUTES/VARIABLE_VALUE")
    )
    slots = {one.name: one for one in model.optimizer.variables}
    for name in ("kernel", "bias"):
        start, end = f"model/layer_with_weights-2/{name}", ".ATTRIBUTES/VARIABLE_VALUE"
        getattr(model.get_layer("out"), name).assign(reader.get_tensor(f"{start}/{end}"))
        for slot, own in (("m", "momentum"), ("v", "velocity")):
            tensor = reader.get_tensor(f"{start}/.OPTIMIZER_SLOT/optimizer/{slot}/{end}")
            slots[f"out_{name}_{own}"].assign(tensor)


def go_on(model):
    """Trains as TFRA did after its checkpoint; returns what must equal what that came to."""
    data = after()
    x = {name: data[name] for name in NAMES}
    before = model.predict(x, verbose=0)
    history = model.fit(x, data["y"], batch_size=16, epochs=3, shuffle=False, verbose=0)
    losses, predictions = history.history["loss"], model.predict(x, verbose=0)
    return {"before": before, "losses": np.array(losses), "predictions": predictions}


def moved(strategy):
    """Results of further training under a strategy."""
    with strategy.scope():
        model, tables = build()
        move(TFRA / "checkpoint" / "ckpt-1", model, tables)
        return go_on(model)
