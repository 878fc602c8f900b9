"""Clicks on items that come and go, with tables for any id.

    python examples/stream.py
    python examples/stream.py --hashed 3000
    keras-psplus run --workers 2 --chief=false --ps 2 --strategy hybrid examples/stream.py
    python examples/stream.py --look stream_tables

Each hour has new items, and items that are not seen any more. The model is tested on an hour's
clicks before it trains on them, which gives an area under the curve for each hour. Rows of items
that nobody has seen for six hours expire, so that the tables do not grow with time. While it
trains, its tables are published; the last command, in another process, shows what one that serves
has.

`--hashed ROWS` is the same model with ids modulo a number of rows, in tables of a fixed size:
items share rows there, and a new item begins with what an old one has left.

An hour's clicks are a function of its number, as what is read from a log at an offset.
"""

import argparse

import keras
import numpy as np

import keras_psplus as psp

CLICKS, BATCH, NEW_ITEMS, LIVES, USERS, DIM = 4096, 128, 250, 6, 1000, 8


def as_ids(numbers):
    """Ids without any order, of 62 bits."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(2)).astype(
        "int64"
    )


def clicks(hour):
    """Ids of items and users of an hour of the stream, and whether they clicked."""
    random = np.random.default_rng(1000 + hour)
    born = random.integers(max(0, hour - LIVES + 1), hour + 1, CLICKS)
    items = born * NEW_ITEMS + (NEW_ITEMS * random.random(CLICKS) ** 2).astype(int)
    users = random.integers(0, USERS, CLICKS)
    # Hidden from the model.
    quality = np.random.default_rng(0).normal(size=(hour + 1) * NEW_ITEMS)[items]
    taste = np.random.default_rng(1).normal(size=USERS)[users]
    clicked = random.random(CLICKS) < 1 / (1 + np.exp(-1.5 * quality - 0.5 * taste))
    return {"item": as_ids(items), "user": as_ids(users)}, clicked.astype("float32")


def build(hashed):
    """Returns the model."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("item", "user")}
    parts = []
    for name, ids in inputs.items():
        if hashed:
            parts.append(keras.layers.Embedding(hashed, DIM, name=f"{name}_table")(ids % hashed))
        else:
            expire = psp.tables.Unused(steps=LIVES * CLICKS // BATCH)
            table = psp.layers.DynamicEmbedding(DIM, expire=expire, name=f"{name}_table")
            parts.append(table(ids))
    outputs = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(parts))
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.Adagrad(0.3)
    model.compile(optimizer, "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--hashed", type=int, default=0, metavar="ROWS")
    parser.add_argument("--folder", default="stream_tables", help="where tables are published")
    parser.add_argument("--look", metavar="FOLDER", help="show the published tables, and end")
    args = parser.parse_args()
    if args.look:
        reader = psp.serving.TableReader(args.look, "item_table/table")
        print(f"stream: items={len(reader)} version={reader.version} step={reader.step}")
        return
    keras.utils.set_random_seed(0)
    strategy = psp.strategy_from_env()
    with strategy.scope():
        model = build(args.hashed)
    publish = [] if args.hashed else [psp.callbacks.PublishTables(args.folder, every=8)]
    areas = []
    for hour in range(args.hours):
        x, y = clicks(hour)
        if hour:
            areas.append(model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)["auc"])
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=publish)
    quarters = [f"{np.mean(part):.3f}" for part in np.array_split(areas, 4)]
    print(f"area under the curve by quarters of the time: {' '.join(quarters)}")
    rows = 2 * args.hashed or sum(len(model.get_layer(f"{n}_table").keys) for n in x)
    late = np.mean(areas[len(areas) // 2 :])
    print(f"stream: auc={late:.3f} first={areas[0]:.3f} rows={rows}")


if __name__ == "__main__":
    main()
