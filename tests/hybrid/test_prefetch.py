"""Rows that are read ahead: one update old, at every worker, whatever comes first.

The one process holds the tables itself, and reads them as they were before the last step's update,
except in the first batch of an epoch whose data begin anew: that is what reading ahead comes to.
"""

import contextlib
import functools
import tempfile
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.all_reduce.data.elements import with_next
from keras_psplus.core.batch.batches import World, split
from keras_psplus.hybrid import rows as subgraph
from keras_psplus.hybrid.server.shard import TableShard
from keras_psplus.hybrid.tables import prefetch
from keras_psplus.tables.row_optimizer import config_of
from tests.faults.at_batch import AtBatch
from tests.hybrid.models import (
    BATCH,
    OneHot,
    Twice,
    compiled,
    data,
    embedding,
    flat,
    head,
    inputs,
    is_alone,
    one_table,
)
from tests.support.cluster import equals_one_process

INT, LONG = tf.int32, tf.int64


class Late(OneHot):
    """An embedding that shows its rows as they were; gradients go to them as they are."""

    def build(self, shape):
        super().build(shape)
        self.shown = tf.Variable(self.embeddings.value, trainable=False)

    def call(self, ids):
        ids = tf.where(ids < 0, ids + self.rows, ids)
        now = self.embeddings.value
        return tf.one_hot(ids, self.rows) @ (now - tf.stop_gradient(now) + self.shown)

    def show(self, value=None):
        self.shown.assign(self.embeddings.value if value is None else value)


class Follow(keras.callbacks.Callback):
    """Sees to what the one process shows: `begins_anew` says whether an epoch's data do."""

    def __init__(self, begins_anew=True):
        super().__init__()
        self.begins_anew, self.before, self.kept = begins_anew, {}, {}

    def tables(self):
        return [layer for layer in self.model.layers if isinstance(layer, Late)]

    def on_epoch_begin(self, epoch, logs=None):
        if self.begins_anew or epoch == 0:
            self.refresh()

    def refresh(self):
        for table in self.tables():
            table.show()

    def on_train_batch_begin(self, batch, logs=None):
        self.before = {t: t.embeddings.numpy() for t in self.tables()}

    def on_train_batch_end(self, batch, logs=None):
        for table, value in self.before.items():
            table.show(value)

    def on_test_begin(self, logs=None):
        self.kept = {t: t.shown.numpy() for t in self.tables()}
        self.refresh()

    def on_test_end(self, logs=None):
        for table, value in self.kept.items():
            table.show(value)


class Change(keras.callbacks.Callback):
    """Changes weights when an epoch ends: what was read before that is of no use.

    Args:
        refresh: Called before and after.
        batch: What to train on when the first one ends, or None.
    """

    def __init__(self, refresh, batch):
        super().__init__()
        self.refresh, self.batch = refresh, batch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0 and self.batch:
            self.refresh()
            self.model.train_on_batch(*self.batch)
            self.refresh()
        if epoch == 1:
            self.model.set_weights([w / 2 for w in self.model.get_weights()])
            self.refresh()


late = functools.partial(embedding, one_process=Late)


def following(**options):
    """Callbacks of the one process."""
    return [Follow(**options)] if is_alone() else []


def stream():
    """Data whose end is not known before it comes, and a step of one's own.

    The second table's ids depend on rows of the first: only these are read ahead.
    """
    x, y = data()

    def batches():
        for i in range(0, len(x), BATCH):
            yield x[i : i + BATCH - i // BATCH], y[i : i + BATCH - i // BATCH]

    spec = tf.TensorSpec([None, 5], tf.int32), tf.TensorSpec([None], tf.int64)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    ids = inputs()
    rows = late()(ids)
    more = embedding(seed=8, name="second")(keras.ops.argmax(rows, axis=-1))
    model = Twice(ids, head(flat(keras.layers.Add()([rows, more]))))
    compiled(model, keras.optimizers.SGD(0.3))
    return model, model.fit(dataset, epochs=2, verbose=0, callbacks=following()).history


def own_share(x, y):
    """The rows that this worker has of all batches."""
    half = BATCH // 2
    first = half * tf.distribute.get_strategy().task.task_index
    mine = np.arange(len(x)).reshape(-1, BATCH)[:, first : first + half].flatten()
    return x[mine], y[mine]


def unending():
    """Epochs that go on in the data; other training, weights that are set, validation in between.

    Then the model is compiled again; in that `fit`, each worker of the cluster has a share of its
    own.
    """
    x, y = data()
    model, results = one_table(one_process=Late), {}
    for i, clip in enumerate((None, 0.05)):
        has_share = clip and not is_alone()
        dataset = tf.data.Dataset.from_tensor_slices(own_share(x, y) if has_share else (x, y))
        dataset = dataset.batch(BATCH, drop_remainder=True).repeat()
        if has_share:
            options = tf.data.Options()
            policy = tf.data.experimental.AutoShardPolicy
            options.experimental_distribute.auto_shard_policy = policy.OFF
            dataset = dataset.with_options(options)
        compiled(model, keras.optimizers.SGD(0.5, global_clipnorm=clip))
        follow = following(begins_anew=False)
        refresh = follow[0].refresh if follow else lambda: None
        history = model.fit(
            dataset,
            steps_per_epoch=4,
            epochs=3,
            verbose=0,
            validation_data=None if clip else (x[:30], y[:30]),
            callbacks=[*follow, Change(refresh, None if clip else (x[:BATCH], y[:BATCH]))],
        )
        results |= {f"{i} {name}": value for name, value in history.history.items()}
    return model, results


class BrokenOff(Exception):
    """What ends a `fit`."""


def break_off():
    raise BrokenOff


def broken_off():
    """A `fit` that goes on from its backup, with the rows that were read ahead then."""
    model = compiled(one_table(one_process=Late), keras.optimizers.Adagrad(0.5))
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False}
    if is_alone():
        return model, model.fit(*data(), callbacks=following(), **options).history
    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=3)
        with contextlib.suppress(BrokenOff):
            model.fit(*data(), callbacks=[backup, AtBatch(0, 4, break_off)], **options)
        return model, model.fit(*data(), callbacks=[backup], **options).history


@pytest.mark.processes
def test_equals_one_process_that_reads_one_update_late():
    equals_one_process("hybrid21_ahead", broken_off)


@pytest.mark.processes
@pytest.mark.extended
def test_what_is_not_read_ahead_is_said_once():
    logs = equals_one_process("hybrid21_ahead", stream).logs
    for line in (
        "rows of 'second/embeddings' are not read ahead in one of its lookups: its ids depend on",
        "are not read ahead in one of its lookups: it is looked up after an update",
    ):
        assert logs["worker-0"].count(line) == logs["worker-1"].count(line) >= 1


@pytest.mark.processes
@pytest.mark.extended
def test_a_share_of_a_worker_s_own_is_read_ahead_as_well():
    logs = equals_one_process("hybrid21_ahead", unending).logs
    assert "are not read ahead" not in "".join(logs.values())


def test_ids_out_of_range_are_named():
    table = types.SimpleNamespace(layer_name="users", rows=24)
    for value, shown in ((43, 43), (24 - 30, -30)):
        message = f"layer users was asked for a row .* ids go from 0 to 23. Received: id {shown}"
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            prefetch.check_range(table, tf.constant([3, value], LONG))


@pytest.mark.extended
def test_each_batch_comes_with_the_one_after_it():
    words = tf.ragged.constant([[1], [2, 3], [4], [5, 6, 7], [8]])
    dataset = tf.data.Dataset.from_tensor_slices((words, tf.range(5))).batch(2)
    shards = dataset.map(lambda *batch: split(batch, World(0, 2, 2)))
    found = [
        (
            [pair.data[1].numpy().tolist() for pair in pairs.replicas],
            [pair.following[0].to_list() for pair in pairs.replicas],
            [bool(pair.is_there) for pair in pairs.replicas],
        )
        for pairs in with_next(shards)
    ]
    assert found == [
        ([[0], [1]], [[[4]], [[5, 6, 7]]], [True, True]),
        # Of the last one, a replica has no rows but one that does not count.
        ([[2], [3]], [[[8]], [[8]]], [True, False]),
        # There is none after it.
        ([[4], [4]], [[[8]], [[8]]], [False, False]),
    ]


def test_a_replica_s_next_batch_can_come_later():
    pairs = list(with_next(tf.data.Dataset.range(5), distance=2))
    assert [int(pair.batch) for pair in pairs] == [0, 1, 2, 3, 4]
    assert [int(pair.following) for pair in pairs if pair.is_there] == [2, 3, 4]


def repeated(compute, given, other):
    """What `compute` makes of `other`, by the operations that it has made of `given`."""

    @functools.partial(tf.function, autograph=False)
    def both(given, other):
        return subgraph.repeat(compute(given), {given.ref(): other})

    return both(tf.constant(given), tf.constant(other)).numpy().tolist()


def test_operations_are_repeated_for_other_data():
    known = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([5, 6], LONG)), -1
    )
    inner = tf.function(lambda words: tf.strings.length(words) + 1)

    def compute(words):
        some = tf.cond(tf.size(words) > 1, lambda: tf.constant(1, LONG), lambda: tf.zeros([], LONG))
        with tf.control_dependencies([tf.debugging.Assert(words[0] == "a", [words])]):
            return known.lookup(words) + some

    assert repeated(compute, ["a", "b"], ["b", "c"]) == [7, 0]
    assert repeated(lambda words: words, ["a"], ["b"]) == [b"b"]
    assert repeated(lambda words: tf.constant([3]), ["a"], ["b"]) == [3]
    assert repeated(lambda words: tf.identity(inner(words)), ["a"], ["two"]) == [4]


def test_what_must_not_be_repeated_is_refused():
    variable = tf.Variable([3, 4])
    for compute, why in (
        (lambda ids: tf.gather(variable.read_value(), ids), "depend on variables"),
        (lambda ids: ids + tf.random.uniform([], 0, 5, INT), "not to be run twice .RandomU"),
    ):
        with pytest.raises(subgraph.NotRepeatable, match=why):
            repeated(compute, [0], [1])


def test_rows_can_be_read_as_they_were_before_the_last_update():
    spec = {"key": 0, "name": "t", "rows": 6, "dim": 2, "initializer": None}
    shard = TableShard(spec, 0, 1, None, None, replicas=1, sync=True, keeps_undo_log=True)
    config = config_of(tf.keras.optimizers.SGD(1.0), None, None, None)
    shard.set_optimizer(config, number=1, first_slot=1)
    methods = shard.methods()

    def update(step, ids):
        header = tf.constant([0, step, 0, 1, 0, step], LONG)
        methods["push1"](header, tf.constant([1.0]), tf.constant(ids, INT), tf.ones([len(ids), 2]))

    def rows(step, ids=(5, 0, 3, 1, 4)):
        return methods["lookup_at"](tf.constant(step, LONG), tf.constant(ids))[:, 0].numpy()

    np.testing.assert_array_equal(rows(0), [0, 0, 0, 0, 0])
    update(0, [4, 1, 3])
    np.testing.assert_array_equal(rows(0), [0, 0, 0, 0, 0])
    np.testing.assert_array_equal(rows(1), [0, 0, -1, -1, -1])
    update(1, [3, 0])
    np.testing.assert_array_equal(rows(1), [0, 0, -1, -1, -1])
    np.testing.assert_array_equal(rows(2), [0, -1, -2, -1, -1])
    update(2, [])
    np.testing.assert_array_equal(rows(2), rows(3))
