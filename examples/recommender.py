"""Two towers that recommend items to users, none of whom were known before.

    python examples/recommender.py
    keras-psplus run --workers 2 --chief=false --ps 2 --strategy hybrid examples/recommender.py
    python examples/recommender.py --serve recommender_files

One tower turns a user, and the last items that the user has chosen, into a vector; the other one
turns an item into one. The larger their product, the likelier the user chooses the item. Both have
tables for any id (`DynamicEmbedding`): each day brings new users and items, and rows of items that
nobody chooses any more expire. Short histories are padded with 0, which has no row.

A run trains on a log of choices, in the order of time, and is tested on the day after. A run that
was killed goes on where it was, once it is started again. While it trains, it publishes its tables
and weights, all under one version; the last command, in another process, recommends by the newest
one. After each day it exports the model, which a process serves that has TensorFlow alone:

    >>> model = tf.saved_model.load("recommender_files/exported/14")
    >>> ids = {"user": [7], "history": [[263] + [0] * 7], "candidates": [[519, 775]]}
    >>> model.serve({name: tf.constant(of, tf.int64) for name, of in ids.items()})

The log is drawn at random: users and items have hidden vectors, and a user chooses among the items
of the last days by how far they agree.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

CHOICES, BATCH = 4096, 128  # of a day, and of a step
NEW_USERS, NEW_ITEMS, DAYS = 100, 150, 4  # a day brings, and so long it shows an item
HISTORY, CANDIDATES, DIM = 8, 10, 16


def id_of(number):
    """An id that says nothing, and is not 0."""
    return number.astype("int64") * 256 + 7


def draw_log(days):
    """Returns ids of all choices, in their order; the first candidate was chosen."""
    random = np.random.default_rng(0)
    tastes = random.normal(size=(days * NEW_USERS, 3))
    kinds = random.normal(size=(days * NEW_ITEMS, 3))
    users, candidates = [], []
    for day in range(days):
        user = random.integers(0, (day + 1) * NEW_USERS, CHOICES)
        shown = np.arange(max(0, day + 1 - DAYS) * NEW_ITEMS, (day + 1) * NEW_ITEMS)
        # Drawn in proportion to the exponential of the agreement.
        chosen = np.argmax(
            1.5 * tastes[user] @ kinds[shown].T + random.gumbel(size=(CHOICES, len(shown))), 1
        )
        others = random.choice(shown, (CHOICES, CANDIDATES - 1))
        users.append(user)
        candidates.append(np.concatenate([shown[chosen][:, None], others], 1))
    user, candidates = id_of(np.concatenate(users)), id_of(np.concatenate(candidates))
    history, last = np.zeros([len(user), HISTORY], "int64"), {}
    for i, (one, item) in enumerate(zip(user, candidates[:, 0])):
        own = last.setdefault(one, [])
        history[i, : len(own)] = own
        last[one] = [*own, item][-HISTORY:]
    return {"user": user, "history": history, "candidates": candidates}


def build():
    """Returns the model: a score of each candidate."""
    user = keras.Input((), dtype="int64", name="user")
    history = keras.Input((HISTORY,), dtype="int64", name="history")
    candidates = keras.Input((None,), dtype="int64", name="candidates")
    users = psp.layers.DynamicEmbedding(DIM, name="users")
    expire = psp.tables.Unused(steps=DAYS * CHOICES // BATCH)
    items = psp.layers.DynamicEmbedding(DIM, mask_value=0, expire=expire, name="items")
    # Padding is masked: of a user without a history, the state is zeros.
    chosen = keras.layers.GRU(DIM)(items(history))
    wanted = keras.layers.Dense(DIM)(keras.layers.Concatenate()([users(user), chosen]))
    scores = keras.layers.Dot((2, 1))([keras.layers.Dense(DIM)(items(candidates)), wanted])
    model = keras.Model({"user": user, "history": history, "candidates": candidates}, scores)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="hits")],
    )
    return model


def serve(folder, x):
    """Recommends to the users of a day by what a run has published so far."""
    model = psp.serving.TableReader(folder / "published").model().pinned()
    scores = model({name: tf.constant(ids) for name, ids in x.items()}).numpy()
    best = np.take_along_axis(x["candidates"], scores.argmax(1)[:, None], 1)
    for user, item in zip(x["user"][:3], best[:3, 0]):
        print(f"user {user}: item {item}")
    hits = (best[:, 0] == x["candidates"][:, 0]).mean()
    print(f"recommender: hits={hits:.3f} version={model.version} step={model.step}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--folder", type=pathlib.Path, default="recommender_files")
    parser.add_argument("--serve", type=pathlib.Path, metavar="FOLDER", help="recommend, and end")
    args = parser.parse_args()
    x = draw_log(args.days + 1)
    x_train, x_test = (
        {n: ids[part] for n, ids in x.items()}
        for part in np.split(np.arange(len(x["user"])), [args.days * CHOICES])
    )
    if args.serve:
        serve(args.serve, x_test)
        return
    keras.utils.set_random_seed(0)
    # In one process, too: its backups have the place in the log.
    strategy = psp.strategy_from_env("hybrid")
    with strategy.scope():
        model = build()

    def export(batch, logs):
        day, rest = divmod(batch + 1, CHOICES // BATCH)
        if not rest:
            psp.serving.export(model, args.folder / "exported" / f"{day}")

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=export),
        keras.callbacks.BackupAndRestore(args.folder / "backup", save_freq=16),
        psp.serving.PublishTables(args.folder / "published", every=16, model=True),
    ]
    y = np.zeros(len(x["user"]), "int64")
    model.fit(
        x_train,
        y[: len(x_train["user"])],
        batch_size=BATCH,
        shuffle=False,
        verbose=2 if strategy.is_chief else 0,
        callbacks=callbacks,
    )
    y_test = y[: len(x_test["user"])]
    hits = model.evaluate(x_test, y_test, batch_size=BATCH, verbose=0, return_dict=True)["hits"]
    rows = {name: len(model.get_layer(name).keys) for name in ("users", "items")}
    if strategy.is_chief:
        print(f"recommender: hits={hits:.3f} users={rows['users']} items={rows['items']}")


if __name__ == "__main__":
    main()
