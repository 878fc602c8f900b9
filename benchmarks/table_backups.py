"""Time that training waits for backups of a dynamic table.

    python benchmarks/table_backups.py [--keys MILLIONS] [--dim DIM] [--folder FOLDER]
    python benchmarks/table_backups.py --workers 2 [...]

A server's table is filled. Then steps of 8,192 keys go on, while all rows are written, and after
that what has changed in 100 steps, twice. Prints how long the server needs before steps may go on,
the longest step while it writes, and bytes.

With `--workers` it is a job of `HybridStrategy` with one server, and what is printed is how long
the chief's `BackupAndRestore` holds up each step after which it begins a backup.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from lab import counted_job

import keras_psplus as psp
from keras_psplus.hybrid.server.server_files import ServerFiles
from keras_psplus.hybrid.server.shard import DynamicShard
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables.row_optimizer import config_of

BATCH, FILLED, STEPS = 1 << 13, 1 << 16, 100
# Of a job, between backups: the next one waits until the one before is on the disk.
BETWEEN = 200


def main() -> None:
    """Prints times and sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=float, default=10.0, help="millions of keys")
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--workers", type=int, default=0, help="measure a job with so many")
    flags = parser.parse_args()
    if flags.workers:
        setting = json.dumps([flags.keys, flags.dim, flags.folder])
        pauses = counted_job.launch(__file__, flags.workers, 1, 900, SETTING=setting)
        print(f"{flags.keys} M keys of dim {flags.dim}: {pauses}")
        return
    initializer = initial_rows.check_initializer("uniform")
    spec = {"name": "t", "key": 0, "dim": flags.dim, "initializer": initializer}
    spec |= {"default": "zeros", "admit": None, "expire": []}
    shard = DynamicShard(spec, 0, 1, None, None, replicas=1, sync=False)
    shard.set_optimizer(config_of(keras.optimizers.Adagrad(), None, None, None), 1, 1)
    push, pushes = shard.methods()["push1"], 0
    files, stems = ServerFiles({0: shard}, {"server": 0, "servers": 1}), list[str]()
    files.saves_in_training, begun = True, time.perf_counter()
    files.prepare()
    print(f"made ready in {time.perf_counter() - begun:.1f} s")

    def step(keys: np.ndarray) -> float:
        """Milliseconds of an update."""
        nonlocal pushes
        header = tf.constant([0, pushes, 0, 1, 0, pushes], tf.int64)
        rows = tf.ones([len(keys), flags.dim])
        begun = time.perf_counter()
        push(header, tf.constant([0.1]), tf.constant(keys), rows).numpy()
        pushes += 1
        return 1e3 * (time.perf_counter() - begun)

    count = int(flags.keys * 1e6) // FILLED * FILLED
    for first in range(0, count, FILLED):
        step(np.arange(first, first + FILLED, dtype=np.int64))
    random = np.random.default_rng(0)

    def batch() -> np.ndarray:
        return np.unique(random.integers(0, count, BATCH))

    alone = [step(batch()) for _ in range(STEPS)]
    print(f"{count / 1e6:.1f} M keys of dim {flags.dim}; a step alone {summary(alone)}")
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        for what in ("all rows", "changes", "changes"):
            stem, begun = f"tables-{len(stems)}", time.perf_counter()
            files.begin_save(folder, stem, stems if what == "changes" else [])
            pause = 1e3 * (time.perf_counter() - begun)
            beside = []
            while files.is_writing:
                beside.append(step(batch()))
            seconds, answer = time.perf_counter() - begun, files.end_save()
            stems.append(stem)
            written = sum(path.stat().st_size for path in pathlib.Path(folder).glob(f"{stem}-*"))
            rows = answer["changes"]
            print(
                f"{what}: waits {pause:.1f} ms; {rows} rows, {written / 1e6:.1f} MB in "
                f"{seconds:.1f} s, beside {len(beside)} steps of {summary(beside)}",
                flush=True,
            )
            for _ in range(STEPS - len(beside)):
                step(batch())


def summary(times: list[float]) -> str:
    """Median and maximum of times."""
    return f"{np.median(times):.1f} ms, at most {max(times):.1f}" if times else "none"


class TimedBackup(keras.callbacks.BackupAndRestore):
    """Notes how long it holds up the steps after which it saves."""

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Begins to note times."""
        super().on_train_begin(logs)
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Perhaps saves."""
        begun = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        self.times.append(1e3 * (time.perf_counter() - begun))


def train(millions: float, dim: int, folder: str | None) -> None:
    """Trains on a worker, and prints the milliseconds of each backup."""
    strategy = psp.HybridStrategy()
    with strategy.scope():
        ids = keras.Input((), dtype="int64")
        rows = psp.layers.DynamicEmbedding(dim)(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile("adagrad", "mse")
    size, random = BATCH * strategy.num_workers, np.random.default_rng(0)
    count = int(millions * 1e6) // FILLED * FILLED

    def fit(keys: np.ndarray, size: int, *callbacks: keras.callbacks.Callback) -> None:
        data = tf.data.Dataset.from_tensor_slices((keys, np.ones([len(keys), 1], "float32")))
        model.fit(data.batch(size, drop_remainder=True), verbose=0, callbacks=callbacks)

    fit(np.arange(count), FILLED)
    where = folder if strategy.is_chief else None
    with tempfile.TemporaryDirectory(dir=where) as own:
        backup = TimedBackup(os.path.join(own, "backup"), save_freq=BETWEEN)
        fit(random.integers(0, count, (3 * BETWEEN + BETWEEN // 2) * size), size, backup)
    saved = [f"{pause:.0f} ms" for pause in backup.times[BETWEEN - 1 :: BETWEEN]]
    if strategy.is_chief:
        counted_job.print_result(f"backups held up steps for {', '.join(saved)}")


if __name__ == "__main__":
    train(*json.loads(os.environ["SETTING"])) if "TF_CONFIG" in os.environ else main()
