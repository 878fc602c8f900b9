"""Clicks on items that come and go, with tables for any id.

    python examples/stream.py
    python examples/stream.py --hashed 3000
    keras-psplus run --workers 2 --chief=false --ps 2 --strategy hybrid examples/stream.py
    python examples/stream.py --backup stream_backup
    python examples/stream.py --look stream_tables

Each hour has new items, and items that are not seen any more. The model is tested on an hour's
clicks before it trains on them, which gives an area under the curve for each hour. Rows of items
that nobody has seen for six hours expire, so that the tables do not grow with time. While it
trains, its tables are published; the last command, in another process, shows what one that serves
has. With `--backup FOLDER`, a run that was killed goes on where it was, once it is started again.

`--hashed ROWS` is the same model with ids modulo a number of rows, in tables of a fixed size:
items share rows there, and a new item begins with what an old one has left.

An hour's clicks are a function of its number, as what is read from a log at an offset. An epoch is
an hour: a backup has the offset, which is the number of the epoch and that of the batch.
"""

import argparse
import functools

import keras
import numpy as np

import keras_psplus as psp

CLICKS, BATCH, NEW_ITEMS, LIVES, USERS, DIM = 4096, 128, 250, 6, 1000, 8


def as_ids(numbers):
    """Ids without any order, of 62 bits."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(2)).astype(
        "int64"
    )


@functools.lru_cache(2)
def clicks_at(hour):
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


class Stream(keras.utils.PyDataset):
    """Batches of the present hour, which `ByTime` sets."""

    hour = 0

    def __len__(self):
        return CLICKS // BATCH

    def __getitem__(self, index):
        x, y = clicks_at(self.hour)
        part = slice(index * BATCH, (index + 1) * BATCH)
        return {name: ids[part] for name, ids in x.items()}, y[part]


class ByTime(keras.callbacks.Callback):
    """Has epochs be hours of the stream, and tests the model on the next one.

    Args:
        stream: The `Stream`.
    """

    def __init__(self, stream):
        super().__init__()
        self.stream, self.areas = stream, []

    def on_epoch_begin(self, epoch, logs=None):
        # Also in the middle of an hour, and without reading those before.
        self.stream.hour = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 < self.params["epochs"]:
            tested = self.model.evaluate(
                *clicks_at(epoch + 1), batch_size=BATCH, verbose=0, return_dict=True
            )
            self.areas.append(tested["auc"])

    def state_dict(self):
        """State for a backup."""
        return {"areas": self.areas}

    def load_state_dict(self, state):
        """Takes what `state_dict` has returned in the process before."""
        self.areas = list(state["areas"])


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
    parser.add_argument("--backup", metavar="FOLDER", help="from which a killed run goes on")
    parser.add_argument("--look", metavar="FOLDER", help="show the published tables, and end")
    args = parser.parse_args()
    if args.look:
        reader = psp.serving.TableReader(args.look)
        items = reader.count("item_table/table")
        print(f"stream: items={items} version={reader.version} step={reader.step}")
        return
    keras.utils.set_random_seed(0)
    # In one process, too: its backups have the place in the stream.
    strategy = psp.strategy_from_env("hybrid")
    with strategy.scope():
        model = build(args.hashed)
    stream = Stream()
    by_time = ByTime(stream)
    callbacks = [by_time]
    if not args.hashed:
        callbacks.append(psp.serving.PublishTables(args.folder, every=8))
    if args.backup:
        callbacks.append(keras.callbacks.BackupAndRestore(args.backup, save_freq=8))
    model.fit(stream, epochs=args.hours, shuffle=False, verbose=0, callbacks=callbacks)
    areas = by_time.areas
    quarters = [f"{np.mean(part):.3f}" for part in np.array_split(areas, 4)]
    print(f"area under the curve by quarters of the time: {' '.join(quarters)}")
    rows = 2 * args.hashed or sum(len(model.get_layer(f"{n}_table").keys) for n in ("item", "user"))
    late = np.mean(areas[len(areas) // 2 :])
    print(f"stream: auc={late:.3f} first={areas[0]:.3f} rows={rows}")


if __name__ == "__main__":
    main()
