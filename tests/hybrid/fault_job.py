"""Trains a table of known values for a number of steps, for tests that disturb it.

fault_job.py STEPS FOLDER [name=value ...]

Each step adds to the rows of its ids what plain gradient descent adds; the chief prints steps, and
at the end whether the table is what it has to be. With `backup=epoch` or `backup=STEPS` it resumes
from the folder, with STEPS in two calls of `fit`, of arrays that are shuffled if `shuffled=1`;
`double=1` keeps the last two backups, also at the end; `die=TASK:NUMBER` kills a server while it
writes that one; `bad_id=1` has worker 1 ask for a row that is not there; `pause=SECONDS` makes
steps slow; `stranger=1` gives worker 1 another job's token; `tables=1` has the tables written to
the folder at the end, and read again; `exit=CODE` ends with that code; `accumulate=STEPS` gives
workers something to keep; `cache=ROWS:STALENESS` gives them copies of rows, and has them write what
they read to the folder; `own=1` has a train_step of the model's own, with optimizers and a count
of steps that are no attributes of the model.
"""

import json
import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.files import shard_files
from keras_psplus.hybrid.tables.hot_rows import HotRows
from keras_psplus.hybrid.tables.table import Table

ROWS, DIM, BATCH, PER_EPOCH = 40, 4, 8, 10


class AddBias(keras.layers.Layer):
    """A dense weight."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(DIM,), initializer="zeros")

    def call(self, rows):
        return rows[:, 0] + self.bias


def with_own_train_step(model, optimizers):
    """A model whose train_step has an optimizer for each of its variables, and counts steps."""
    count = tf.Variable(0, trainable=False)

    class Own(keras.Model):
        def train_step(self, data):
            ids, zeros = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(ids, zeros, self(ids, training=True))
            variables = self.trainable_variables
            grads = tape.gradient(loss, variables)
            for optimizer, variable, grad in zip(optimizers, variables, grads):
                optimizer.apply([grad], [variable])
            count.assign_add(1)
            return {"loss": loss}

    own = Own(model.inputs, model.outputs)
    own.count = lambda: int(count.numpy())
    return own


def expected(ids, momentum):
    """What plain descent makes of the table, lazily, and of the bias."""
    rows, bias = np.zeros((2, ROWS, DIM), "float32"), np.zeros((2, DIM), "float32")
    for batch in ids.reshape(-1, BATCH):
        # The gradient of the mean over a batch of rows that are all different.
        rows[1, batch] = momentum * rows[1, batch] - 1 / BATCH / DIM
        rows[0, batch] += rows[1, batch]
        bias[1] = momentum * bias[1] - 1 / DIM
        bias[0] += bias[1]
    return [bias[0], rows[0]]


def own_task():
    """This process's name in the cluster."""
    own = json.loads(os.environ["TF_CONFIG"])["task"]
    return f"{own['type']}-{own['index']}"


def die_in_backup(task, number):
    """Kills the server of that name when it has written parts of that backup, but not all."""
    if task != own_task():
        return
    merge, times = shard_files.tf.raw_ops.MergeV2Checkpoints, []

    def write(*args, **kwargs):
        times.append(None)
        if len(times) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return merge(*args, **kwargs)

    shard_files.tf.raw_ops.MergeV2Checkpoints = write


def whole_tables():
    """Names of this process's reads and writes of whole tables, a list that grows."""
    found = []

    def counted(name):
        original = getattr(Table, name)

        def call(*args):
            found.append(name)
            return original(*args)

        setattr(Table, name, call)

    counted("read")
    counted("write")
    return found


def cache_of(words, folder):
    """The cache that an option says, whose reads are written to a file of this process's."""
    file = (folder / f"reads-{own_task()}-{os.getpid()}").open("w", buffering=1)

    def note(_, now, ids, is_read):
        lines = (f"{now} {row} {int(one)}\n" for row, one in zip(ids, is_read))
        file.write("".join(lines))

    HotRows.on_read = note
    rows, staleness = map(int, words.split(":"))
    return psp.tables.Cache(rows, staleness)


def read_by_all(folder, seconds=60):
    """Waits until each worker has come here."""
    config = json.loads(os.environ["TF_CONFIG"])
    (folder / f"read-by-{config['task']['index']}").touch()
    deadline = time.monotonic() + seconds
    while len(list(folder.glob("read-by-*"))) < len(config["cluster"]["worker"]):
        assert time.monotonic() < deadline, "another worker has not read its weights"
        time.sleep(0.05)


def main():
    keras.utils.set_random_seed(1)
    steps, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    options = dict(word.split("=") for word in sys.argv[3:])
    pause = float(options.get("pause", 0))
    if options.get("die"):
        die_in_backup(*options["die"].split(":"))
    is_stranger = options.get("stranger") and own_task() == "worker-1"
    accumulate = int(options.get("accumulate", 0))
    save_freq = options.get("backup")
    in_two = save_freq not in (None, "epoch")
    strategy = psp.HybridStrategy(
        placement={"*/embeddings": "parameter_server"},
        sync=options.get("sync", "1") == "1",
        prefetch=options.get("prefetch") == "1",
        table_timeout=float(options.get("timeout", 60)),
        job_token="another job" if is_stranger else "this job",
        updates=psp.updates.Accumulate(accumulate) if accumulate else None,
        tables_dir=folder if options.get("tables") else None,
        cache=cache_of(options["cache"], folder) if options.get("cache") else None,
    )
    ids = np.arange(BATCH * steps).astype("int32").reshape(-1, 1) % ROWS
    if options.get("bad_id"):
        ids[7 * BATCH + BATCH - 1] = ROWS + 3

    with strategy.scope():
        embedding = keras.layers.Embedding(ROWS, DIM, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((1,), dtype="int32"), embedding, AddBias()])
        momentum = float(options.get("momentum", 0))
        optimizers = [keras.optimizers.SGD(1.0, momentum=momentum) for _ in range(3)]
        if options.get("own"):
            model = with_own_train_step(model, optimizers)
        model.compile(
            optimizer=optimizers[-1 if options.get("own") else 0],
            loss=lambda y, rows: tf.reduce_mean(rows, axis=-1),
        )

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(pause)
            print(f"batch {int(optimizers[0].iterations.numpy())}.", flush=True)

    whole = whole_tables()
    callbacks, repeats, shuffled = [Tell()], 1, bool(options.get("shuffled"))
    if save_freq:
        # Of shuffled ones, none may come twice in a batch.
        per_epoch = ROWS // BATCH if shuffled else PER_EPOCH
        repeats, ids = steps // per_epoch, ids[: BATCH * per_epoch]
        save_freq = int(save_freq) if in_two else save_freq
        kept = options.get("double") == "1"
        callbacks.append(
            keras.callbacks.BackupAndRestore(
                folder / "backup", save_freq, double_checkpoint=kept, delete_checkpoint=not kept
            )
        )
    zeros = np.zeros((len(ids), 1), "float32")
    arguments = {"verbose": 0, "callbacks": callbacks}
    if shuffled:
        arguments.update(x=ids, y=zeros, batch_size=BATCH)
        model.fit(**arguments, validation_data=(ids[:BATCH], zeros[:BATCH]))
        print(f"whole tables: {whole}", flush=True)
        print(f"between: {np.count_nonzero(embedding.get_weights()[0])}", flush=True)
        whole.clear()
        model.fit(**arguments, initial_epoch=1, epochs=repeats)
    else:
        data = tf.data.Dataset.from_tensor_slices((ids, zeros)).batch(BATCH)
        for epochs in (1, repeats - 1) if in_two else (repeats,):
            model.fit(data, epochs=epochs, **arguments)
    print(f"whole tables: {whole}", flush=True)
    found, right = model.get_weights(), expected(np.tile(ids, (repeats, 1)), momentum)
    # In Keras's order of weights.
    right = [next(w for w in right if w.shape == f.shape) for f in found]
    difference = max(float(np.abs(f - w).max()) for f, w in zip(found, right))
    missing = next(float((f - w)[:, 0].sum()) for f, w in zip(found, right) if f.ndim == 2)
    print(
        f"end iterations={int(optimizers[0].iterations.numpy())} off={difference:.1e} "
        f"missing={missing * BATCH * DIM:g}"
    )
    if options.get("own"):
        print(f"count={model.count()}")
    print("weights", *(float(abs(w).sum()) for w in found))
    if options.get("tables"):
        strategy.save_tables(folder / "tables")
        # Tables are shared: whoever has not read them yet would find what the chief sets next.
        read_by_all(folder)
        model.set_weights([np.zeros_like(w) for w in found])
        strategy.load_tables(folder / "tables")
        table = embedding.get_weights()[0]
        print(f"loaded off={np.abs(table - right[0]).max():.1e}")
    sys.exit(int(options.get("exit", 0)))


if __name__ == "__main__":
    main()
