"""Time that training waits for backups of a dynamic table, on one parameter server's side.

python benchmarks/table_backups.py [--keys MILLIONS] [--dim DIM] [--folder FOLDER]

A server's table is filled. Then steps of 8,192 keys go on, while all rows are written, and after
that what has changed in 100 steps, twice. Prints how long the server needs before steps may go on,
the longest step while it writes, and bytes.
"""

import argparse
import os
import pathlib
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.hybrid.server.dynamic_shard import DynamicShard
from keras_psplus.hybrid.server.server_files import ServerFiles
from keras_psplus.tables import initial_rows
from keras_psplus.tables.rows.row_optimizer import config_of

BATCH, FILLED, STEPS = 1 << 13, 1 << 16, 100


def main() -> None:
    """Prints times and sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=float, default=10.0, help="millions of keys")
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    flags = parser.parse_args()
    initializer = initial_rows.check_initializer("uniform")
    spec = {"name": "t", "key": 0, "dim": flags.dim, "initializer": initializer}
    spec |= {"default": "zeros", "admit": None, "expire": []}
    shard = DynamicShard(spec, 0, 1, None, None, replicas=1, sync=False)
    shard.set_optimizer(config_of(keras.optimizers.Adagrad(), None, None, None), 1, 1)
    push, pushes = shard.methods()["push1"], 0

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
    files, stems = ServerFiles({0: shard}, {"server": 0, "servers": 1}), list[str]()
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        # The first one traces.
        for what in ("traced", "all rows", "changes", "changes"):
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
            for _ in range(STEPS - len(beside) if what != "traced" else 0):
                step(batch())


def summary(times: list[float]) -> str:
    """Median and maximum of times."""
    return f"{np.median(times):.1f} ms, at most {max(times):.1f}" if times else "none"


if __name__ == "__main__":
    main()
