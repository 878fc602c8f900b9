"""Trains tables of known values for a number of steps, for tests that disturb it.

fault_job.py STEPS FOLDER [name=value ...]

Each step adds to the rows of its ids, in a table of numbered rows and in one of keys, what plain
gradient descent adds; the chief prints steps, and at the end whether the tables are what they have
to be. Options:

    backup=epoch    resumes from the folder; backup=STEPS too, in two calls of `fit`
    shuffled=1      with `backup=STEPS`, from arrays that are shuffled
    double=1        keeps the last two backups, also at the end
    die=TASK:NUMBER a server is killed while it writes that backup
    bad_id=1        worker 1 asks for a row that is not there
    pause=SECONDS   makes steps slow
    stranger=1      worker 1 has another job's token
    tables=1        has the tables written to the folder at the end, and read again
    exit=CODE       ends with that code
    half=1          has rows of keys, and their slots, in bfloat16
    accumulate=N    gives workers something to keep
    cache=ROWS:AGE  gives workers copies of rows, and has them write what they read to the folder
    own=1           a train_step of the model's own, with optimizers and a count of steps that are
                    no attributes of the model
    sync=0, prefetch=1, shard=all, momentum=M, timeout=SECONDS: of the strategy and the optimizer
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
from keras_psplus.files import tables as shard_files
from keras_psplus.hybrid.tables.dynamic import DynamicTable
from keras_psplus.hybrid.tables.row_cache import HotRows
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables.keys import check_initializer
from keras_psplus.tables.local import outside
from keras_psplus.tables.row_optimizer import config_of
from keras_psplus.tables.store import RowStore
from tests.support.jobs import wait_for

ROWS, DIM, BATCH, PER_EPOCH = 40, 4, 8, 10
HALF = {"rows_dtype": "bfloat16", "slots_dtype": "bfloat16"}


class AddBias(keras.layers.Layer):
    """A dense weight."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(DIM,), initializer="zeros")

    def call(self, rows):
        return rows[:, 0] + self.bias


class Own(keras.Model):
    """A model whose train_step has an optimizer for each of its variables, and counts steps."""

    def __init__(self, *args, optimizers, **kwargs):
        super().__init__(*args, **kwargs)
        count = tf.Variable(0, trainable=False)

        def step(data):
            ids, zeros = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(ids, zeros, self(ids, training=True))
            variables = self.trainable_variables
            grads = tape.gradient(loss, variables)
            for optimizer, variable, grad in zip(optimizers, variables, grads):
                optimizer.apply([grad], [variable])
            count.assign_add(1)
            return {"loss": loss}

        # In functions, where Keras does not track them.
        self.step, self.count = step, lambda: int(count.numpy())

    def train_step(self, data):
        return self.step(data)


def linear_model(make=keras.Model, types=None, **options):
    """A model that shows the sum of the rows of an id in either table, and a bias."""
    ids = keras.Input((1,), dtype="int64")
    numbers = keras.layers.Embedding(ROWS, DIM, embeddings_initializer="zeros")
    keys = psp.layers.DynamicEmbedding(DIM, initializer="zeros", name="keys", **types or {})
    rows = keras.layers.Add()([numbers(ids), keys(ids)])
    return make(ids, AddBias()(rows), **options), numbers, keys


def linear_loss(y, rows):
    """A loss whose gradient does not depend on what is read."""
    return tf.reduce_mean(rows, axis=-1)


def expected(ids, momentum=0.0):
    """Rows after plain descent, lazily, and the bias."""
    rows, bias = np.zeros((2, ROWS, DIM), "float32"), np.zeros((2, DIM), "float32")
    for batch in ids.reshape(-1, BATCH):
        # The gradient of the mean over a batch of rows that are all different.
        rows[1, batch] = momentum * rows[1, batch] - 1 / BATCH / DIM
        rows[0, batch] += rows[1, batch]
        bias[1] = momentum * bias[1] - 1 / DIM
        bias[0] += bias[1]
    return rows[0], bias[0]


def expected_halves(ids, momentum):
    """Rows of keys in bfloat16: those of a store in this process."""
    spec = {"name": "t", "dim": DIM, "default": "zeros", "admit": None, "expire": [], **HALF}
    store = RowStore({**spec, "initializer": check_initializer("zeros")})
    optimizer = keras.optimizers.SGD(1.0, momentum=momentum)
    store.set_optimizer(config_of(optimizer, None, None, None))
    gradient, scalars = tf.fill([BATCH, DIM], 1 / BATCH / DIM), tf.zeros([0])
    for step, batch in enumerate(ids.reshape(-1, BATCH)):
        numbers = tf.constant(1.0), scalars, tf.constant(step, tf.int64)
        store.apply(tf.constant(batch), gradient, *numbers)
    return store.lookup(tf.range(ROWS, dtype=tf.int64), False).numpy()


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

    def count(owner, name):
        original = getattr(owner, name)

        def call(*args):
            found.append(name)
            return original(*args)

        setattr(owner, name, call)

    for owner, name in (
        (Table, "read"),
        (Table, "write"),
        (DynamicTable, "snapshot"),
        (DynamicTable, "write"),
    ):
        count(owner, name)
    return found


def cache_of(words, folder):
    """The cache that an option says, whose reads are written to a file of this process's."""
    file = (folder / f"reads-{own_task()}-{os.getpid()}").open("w", buffering=1)

    def note(hot, now, ids, is_read):
        lines = (f"{now} {id(hot)}-{row} {int(one)}\n" for row, one in zip(ids, is_read))
        file.write("".join(lines))

    HotRows.on_read = note
    rows, staleness = map(int, words.split(":"))
    return psp.tables.Cache(rows, staleness)


class Tell(keras.callbacks.Callback):
    """Says how many steps have been, and makes them slow."""

    def __init__(self, optimizer, pause):
        super().__init__()
        self.iterations, self.pause = optimizer.iterations, pause

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.pause)
        print(f"batch {int(self.iterations.numpy())}.", flush=True)


def tell_end(model, tables, ids, momentum, iterations):
    """Prints how far weights and counts are off, and what rows and keys miss."""
    rows, bias = expected(ids, momentum)
    right = {bias.shape: bias, rows.shape: rows}
    off = max(float(np.abs(found - right[found.shape]).max()) for found in model.get_weights())
    missing = [(table.get_weights()[0] - rows)[:, 0] * BATCH * DIM for table in tables]
    uses = np.bincount(ids.ravel(), minlength=ROWS) - tables[1].counts()[0]
    print(f"end iterations={iterations} off={off:.1e} missing={missing[0].sum():g}")
    # Of each key, its row and its count miss the same.
    print(f"keys missing={uses.sum()} uneven={np.abs(missing[1] - uses).max():.1e}")
    print("weights", *(float(abs(w).sum()) for w in model.get_weights()))


def main():
    keras.utils.set_random_seed(1)
    steps, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    options = dict(word.split("=") for word in sys.argv[3:])
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
        shard=options.get("shard"),
        table_timeout=float(options.get("timeout", 60)),
        job_token="another job" if is_stranger else "this job",
        updates=psp.updates.Accumulate(accumulate) if accumulate else None,
        tables_dir=folder if options.get("tables") else None,
        cache=cache_of(options["cache"], folder) if options.get("cache") else None,
    )
    ids = np.arange(BATCH * steps).reshape(-1, 1) % ROWS
    if options.get("bad_id"):
        ids[7 * BATCH + BATCH - 1] = ROWS + 3
    momentum = float(options.get("momentum", 0))
    with strategy.scope():
        optimizers = [keras.optimizers.SGD(1.0, momentum=momentum) for _ in range(4)]
        own = {"make": Own, "optimizers": optimizers[:3]} if options.get("own") else {}
        types = HALF if options.get("half") else None
        model, numbers, keys = linear_model(types=types, **own)
        model.compile(optimizer=optimizers[-1 if own else 0], loss=linear_loss)

    whole = whole_tables()
    tell = Tell(optimizers[0], float(options.get("pause", 0)))
    callbacks, repeats, shuffled = [tell], 1, bool(options.get("shuffled"))
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
        print(f"between: {np.count_nonzero(numbers.get_weights()[0])}", flush=True)
        whole.clear()
        model.fit(**arguments, initial_epoch=1, epochs=repeats)
    else:
        data = tf.data.Dataset.from_tensor_slices((ids, zeros)).batch(BATCH)
        for epochs in (1, repeats - 1) if in_two else (repeats,):
            model.fit(data, epochs=epochs, **arguments)
    print(f"whole tables: {whole}", flush=True)
    trained = np.tile(ids, (repeats, 1))
    tell_end(model, (numbers, keys), trained, momentum, int(optimizers[0].iterations.numpy()))
    if types:
        halves = outside(lambda: expected_halves(trained, momentum))
        exact, _ = expected(trained, momentum)
        off, rounded = (np.abs(keys.get_weights()[0] - of).max() for of in (halves, exact))
        print(f"halves off={off:.1e} rounded={rounded:.1e}")
    if own:
        print(f"count={model.count()}")
    if options.get("tables"):
        strategy.save_tables(folder / "tables")
        # Tables are shared: whoever has not read them yet would find what the chief sets next.
        (folder / f"read-by-{own_task()}").touch()
        wait_for(lambda: len(list(folder.glob("read-by-*"))) == 2, what="another worker")
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        strategy.load_tables(folder / "tables")
        rows, _ = expected(trained, momentum)
        off = max(np.abs(layer.get_weights()[0] - rows).max() for layer in (numbers, keys))
        print(f"loaded off={off:.1e}")
    sys.exit(int(options.get("exit", 0)))


if __name__ == "__main__":
    main()
