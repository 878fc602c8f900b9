"""Trains a small model with TFRA 0.8.1, and writes its files and what becomes of it.

    python3.11 -m venv /tmp/tfra
    /tmp/tfra/bin/pip install tensorflow==2.16.2 tf_keras==2.16.0 \
        tensorflow-recommenders-addons==0.8.1
    /tmp/tfra/bin/python tests/tables/tfra/make.py

It has written `checkpoint/` (tables in a checkpoint of TensorFlow's, two shards each, and how often
items were updated), `files/` (tables of the same model in files of their own), and `after.npz`:
the data, and the predictions and losses when it trained on.
"""

import os
import pathlib
import shutil

os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="")

import numpy as np
import tensorflow as tf
import tf_keras as keras
from tensorflow_recommenders_addons import dynamic_embedding as de

HERE = pathlib.Path(__file__).parent
DIM, BATCH = 4, 16


def data():
    """Ids of users and of three items each, and targets."""
    random = np.random.default_rng(0)
    users = random.integers(-9, 9, (64, 1)) * 2**40 + random.integers(0, 2, (64, 1))
    items = random.integers(0, 25, (64, 3)) * 10**9 + random.integers(0, 2, (64, 3))
    return {"user": users, "items": items}, random.normal(size=(64, 1)).astype("float32")


def build(**options):
    """A model with two tables, on Adam."""
    keras.utils.set_random_seed(0)
    ids = {
        "user": keras.Input((1,), dtype=tf.int64, name="user"),
        "items": keras.Input((3,), dtype=tf.int64, name="items"),
    }
    parts = []
    for name, one in ids.items():
        policy = de.FrequencyRestrictPolicy if name == "items" else None
        table = de.keras.layers.Embedding(
            DIM,
            name=f"{name}_embedding",
            initializer=keras.initializers.RandomNormal(seed=len(name)),
            devices=["/CPU:0"] * 2,
            restrict_policy=policy,
            **options,
        )
        parts.append(keras.layers.Lambda(lambda rows: tf.reduce_mean(rows, 1))(table(one)))
    outputs = keras.layers.Dense(1, name="out")(keras.layers.Concatenate()(parts))
    model = keras.Model(ids, outputs)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adam(0.01))
    model.compile(optimizer, "mse")
    return model, optimizer


def train(model, epochs):
    x, y = data()
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"]


def main():
    for name in ("checkpoint", "files"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    model, optimizer = build()
    train(model, 2)
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(HERE / "checkpoint" / "ckpt")
    (x, y), before = data(), model.predict(data()[0], verbose=0)
    losses = train(model, 3)
    predictions = model.predict(x, verbose=0)
    np.savez(HERE / "after.npz", y=y, before=before, losses=losses, predictions=predictions, **x)
    keras.backend.clear_session()
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver())
    model, optimizer = build(kv_creator=creator)
    train(model, 2)
    de.train.DECheckpoint(model=model, optimizer=optimizer).save(str(HERE / "files" / "ckpt"))


if __name__ == "__main__":
    main()
