"""Training with tables on two parameter servers equals training in one process."""

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.hybrid.fault_job import expected, linear_loss, linear_model
from tests.hybrid.models import (
    BATCH,
    DIM,
    ROWS,
    OwnAdam,
    Twice,
    compiled,
    data,
    embedding,
    flat,
    head,
    initializer,
    inputs,
    is_alone,
    one_table,
    slots,
)
from tests.support.cluster import equals_one_process, makes_scope, run, strategy_of
from tests.support.parts import swapped
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

optimizers, schedules = keras.optimizers, keras.optimizers.schedules


class Own(keras.initializers.Initializer):
    """An initializer that the servers do not know."""

    def __call__(self, shape, dtype=None):
        return initializer(8)(shape, dtype)


OPTIMIZERS = {
    "adam_w": lambda: optimizers.AdamW(
        schedules.ExponentialDecay(0.05, 3, 0.5), weight_decay=0.1, clipvalue=0.001
    ),
    "global_clipnorm": lambda: optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.05),
}


def trained(model, optimizer, batch=BATCH, **options):
    """Trains a model, and returns it with what its steps have been."""
    compiled(model, optimizer, **options)
    return model, model.fit(*data(), batch, epochs=2, shuffle=False, verbose=0).history


def whole(jit_compile="auto"):
    """Trains, evaluates and predicts, also batches that are not full.

    One of two tables is shared by two calls of its layer, and of the other several rows are summed.
    """
    (x, y), ids = data(), inputs()
    shared, other = embedding(), embedding(dim=4, embeddings_initializer=Own())
    features = shared(ids[:, :2]), shared(ids[:, 3:]), keras.ops.sum(other(ids), axis=1)
    model = keras.Model(ids, head(flat(*features)))
    model, results = trained(model, optimizers.SGD(0.5), jit_compile=jit_compile)
    results["evaluated"] = model.evaluate(x, y, batch_size=40, verbose=0)
    results["predicted"] = model.predict(x[:21], batch_size=8, verbose=0)
    return model, results


def optimizer(name):
    model, _ = trained(one_table(), OPTIMIZERS[name]())
    return model, slots(model)


def of_rows():
    """A regulariser and a constraint, of the rows of a step."""
    options = {
        "embeddings_regularizer": keras.regularizers.L2(0.05),
        "embeddings_constraint": keras.constraints.UnitNorm(1),
    }
    # The loss of a table on servers has no part of its regulariser.
    return trained(one_table(**options), optimizers.SGD(0.5))[0], {}


def wherever():
    """Keras's layer, wherever its table is."""
    ids = inputs()
    model = keras.Model(ids, head(flat(keras.layers.Embedding(ROWS, DIM, initializer(7))(ids))))
    return trained(model, optimizers.SGD(0.5))


def beside_rows():
    """A table on servers, and one on workers, whose gradients are rows until they are clipped.

    The optimizer is one that the library does not know.
    """
    ids = inputs()
    on_workers = keras.layers.Embedding(ROWS, 4, initializer(9), name="on_workers")
    model = keras.Model(ids, head(flat(embedding()(ids), on_workers(ids))))
    model, results = trained(model, OwnAdam(0.05, global_clipnorm=0.05))
    return model, results | slots(model)


def accumulated():
    """Under `updates=Accumulate(2)`; one process has batches twice as large."""
    with swapped(updates="accumulate:2"):
        batch = 2 * BATCH if is_alone() else BATCH
        return trained(one_table(), optimizers.SGD(0.5), batch=batch)


def again():
    """Compiles again; then the chief is late to set weights, and a branch looks up.

    The new optimizer has slots of its own, and no worker trains with weights that are not set yet.
    """
    x, y = data()
    ids, rows = inputs(), embedding()
    branch = keras.layers.Lambda(
        lambda ids: tf.cond(
            tf.reduce_sum(ids) > 0,
            lambda: rows(ids),
            lambda: tf.zeros([tf.shape(ids)[0], 5, DIM]),
        ),
        output_shape=(5, DIM),
    )
    model = keras.Model(ids, head(flat(keras.layers.Add()([rows(ids), branch(ids)]))))
    trained(model, optimizers.Nadam(0.05))
    weights = model.get_weights()
    model.compile(optimizer=optimizers.Nadam(0.05), loss=model.loss)
    for delay in (0, 1):
        if tf.distribute.get_strategy().extended.should_checkpoint:
            time.sleep(delay)
        model.set_weights(weights)
        model.train_on_batch(x[:BATCH], y[:BATCH])
    return model, slots(model)


def own_step():
    """Two updates a step, and lookups between."""
    ids = inputs()
    model = Twice(ids, head(flat(embedding()(ids))))
    return trained(model, optimizers.SGD(0.5))


def several():
    """A frozen layer and low-rank factors beside a table, under a loss scale; some decay."""
    glorot = keras.initializers.GlorotUniform
    ids = inputs()
    frozen = keras.layers.Dense(8, "tanh", kernel_initializer=glorot(5), trainable=False)
    factors = keras.layers.Dense(6, "tanh", kernel_initializer=glorot(6))
    model = keras.Model(ids, head(factors(frozen(flat(embedding()(ids))))))
    factors.enable_lora(2, a_initializer=glorot(8))
    inner = optimizers.AdamW(0.05, weight_decay=0.1, global_clipnorm=0.05)
    inner.exclude_from_weight_decay(var_names=["bias"])
    optimizer = optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=3)
    model, results = trained(model, optimizer)
    return model, results | slots(model)


def tied():
    """Beside a table, one that makes logits, too, and a layer that is called twice."""
    glorot, ids = keras.initializers.GlorotUniform(5), inputs()
    words = keras.layers.ReversibleEmbedding(ROWS, DIM, embeddings_initializer=initializer(9))
    twice = keras.layers.Dense(DIM, "tanh", kernel_initializer=glorot)
    features = twice(twice(embedding()(ids) + words(ids)))
    model = keras.Model(ids, words(keras.ops.mean(features, 1), reverse=True))
    model, results = trained(model, optimizers.Adam(0.01))
    return model, results | slots(model)


def muon():
    """Muon and averages of what is no table, whose optimizer is another one."""
    inner = optimizers.Muon(0.05, weight_decay=0.1, use_ema=True, ema_momentum=0.9)
    rules = keras.optimizers.OptimizerMap(inner, {".*table.*": optimizers.Adam(0.05)})
    model, results = trained(one_table(name="table"), keras.optimizers.MultiOptimizer(rules))
    return model, results | slots(model)


def mixed():
    """Mixed precision, in which a row of one worker's first batch overflows."""
    x, y = data()
    weights = np.where(np.arange(len(x)) == BATCH - 1, 64.0, 1.0)
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        ids = inputs()
        table = keras.layers.Embedding(ROWS, DIM, initializer(7))
        model = keras.Model(ids, head(flat(table(ids))))
    finally:
        keras.config.set_dtype_policy(policy)
    scale = {"initial_scale": 2.0**17, "dynamic_growth_steps": 3}
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.5), **scale)
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    compiled(model, optimizer)
    history = model.fit(x, y, BATCH, sample_weight=weights, **options).history
    return model, history | slots(model)


@makes_scope
def by_tapes(scope):
    """Gradients by tapes in functions and around them, of tables of numbered rows and of keys."""
    import keras_psplus as psp

    with scope():
        ids = inputs()
        keys = psp.layers.DynamicEmbedding(DIM, initializer=initializer(9), name="keys")
        model = keras.Model(ids, head(flat(embedding()(ids), keys(ids))))
        compiled(model, optimizers.SGD(0.5))
    x, y = (tf.constant(of[:BATCH]) for of in data())
    model.train_on_batch(x, y)

    def found(call):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(call(x)[:, 0])
        return tape.gradient(loss, model.trainable_variables)

    function, results = tf.function(model), {}
    for name, grads in {
        "eager": found(model),
        "around": found(function),
        "inside": tf.function(lambda: found(model))(),
        "between": tf.function(lambda: found(function))(),
    }.items():
        for i, gradient in enumerate(grads):
            if isinstance(gradient, tf.IndexedSlices):
                order = tf.argsort(gradient.indices)
                results[f"{name}/{i}/rows"] = tf.gather(gradient.indices, order)
                gradient = tf.gather(gradient.values, order)
            results[f"{name}/{i}"] = gradient
    return results


@makes_scope
def by_steps(scope):
    """A loop of the script's own, whose step calls a function."""
    strategy = strategy_of(scope)
    with scope():
        model, optimizer = one_table(), optimizers.SGD(0.5)
        optimizer.build(model.trainable_variables)
    loss_of_rows = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    call, variables = tf.function(lambda ids: model(ids, training=True)), model.trainable_variables

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of_rows(y, call(x))) / BATCH
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def step(*batch):
        return strategy.reduce("sum", strategy.run(replica_step, batch), axis=None)

    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(batches)
    return model, {"losses": [float(step(*batch)) for batch in batches]}


def keras_rs():
    """KerasRS's layer: a table for two features, summed and averaged, and one on the workers.

    One process has the same layer, whose gradients are sparse.
    """
    from keras_rs.layers import DistributedEmbedding, FeatureConfig, TableConfig

    def table(name, placement, combiner="mean"):
        return TableConfig(name, ROWS, DIM, initializer(9), "sgd", combiner, placement)

    def feature(name, table, length):
        return FeatureConfig(name, table, (None, length), (None, DIM))

    shared = table("shared", "parameter_server", "sqrtn")
    configs = {
        "two": feature("two", shared, 2),
        "three": feature("three", shared, 3),
        "automatic": feature("automatic", table("automatic", "auto", "sum"), 5),
        "here": feature("here", table("here", "default_device"), 2),
    }
    ids = inputs()
    features = {"two": ids[:, :2], "three": ids[:, 2:], "automatic": ids, "here": ids[:, 1:3]}
    layer = DistributedEmbedding(configs)
    again = DistributedEmbedding.from_config(layer.get_config())
    model = keras.Model(ids, head(keras.layers.Concatenate()(list(again(features).values()))))
    return trained(model, optimizers.SGD(0.5))


@pytest.mark.parametrize("case", [whole, *extended(beside_rows, accumulated, of_rows, own_step)])
def test_equals_one_process(case):
    equals_one_process("hybrid22", case)


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["hybrid21_shards", "hybrid21_all"])
def test_a_norm_of_rows_and_parts(layout):
    log = equals_one_process(layout, optimizer, name="global_clipnorm").logs["worker-0"]
    assert ("4 of 5 variables are cut into equal parts" in log) == (layout == "hybrid21_all")


@pytest.mark.extended
def test_what_comes_after_tables_is_compiled():
    equals_one_process("hybrid22", whole, jit_compile=True)


@pytest.mark.extended
def test_keras_rs():
    pytest.importorskip("keras_rs")
    # Plain Keras knows no such placements.
    equals_one_process("hybrid22", keras_rs, alone="hybrid1")


@pytest.mark.extended
def test_one_process_with_two_devices_needs_no_servers():
    equals_one_process("hybrid_devices2", wherever)


def asynchronous():
    """Trains tables whose rows are the sums of their gradients, whenever these come."""
    model, numbers, keys = linear_model()
    model.compile(optimizers.SGD(1.0), linear_loss)
    ids = np.arange(30 * 8).reshape(-1, 1) % 40
    dataset = tf.data.Dataset.from_tensor_slices((ids, np.zeros([len(ids), 1]))).batch(8)
    model.fit(dataset, verbose=0)
    counts, rows = keys.counts()[0], (numbers.get_weights()[0], keys.get_weights()[0])
    return {"ids": ids, "rows": rows, "keys": keys.keys, "counts": counts}


def test_asynchronous_updates_count_once():
    found = run("hybrid21_async", asynchronous).first
    rows, _ = expected(found["ids"])
    np.testing.assert_array_equal(found["rows"], [rows, rows])
    np.testing.assert_array_equal(found["keys"], np.arange(40))
    np.testing.assert_array_equal(found["counts"], np.full(40, 6))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("hybrid21_shards", again),
        ("hybrid21_shards", several),
        *(("hybrid21_all", case) for case in (again, whole, beside_rows, accumulated, own_step)),
        *(("hybrid21_all", case) for case in (several, tied, muon)),
    ],
)
def test_beside_shares(layout, case):
    equals_one_process(layout, case)


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["hybrid22", "hybrid21_all"])
def test_tapes_find_gradients_around_functions(layout):
    ways = {}
    for name, value in run(layout, by_tapes).first.items():
        way, _, name = name.partition("/")
        ways.setdefault(way, {})[name] = value
    # Of two tables and two layers.
    assert len(ways) == 4 and len(ways["eager"]) == 2 * 2 + 4
    for found in ways.values():
        assert_close(found, ways["eager"], 2e-5)


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["hybrid22", "hybrid21_all"])
def test_a_step_may_call_a_function(layout):
    equals_one_process(layout, by_steps)


@pytest.mark.extended
def test_all_workers_skip_what_overflows_in_16_bits_on_one():
    found = equals_one_process("hybrid21_all", mixed, 1e-2).first
    # Of twelve updates, those of the first batches of two epochs.
    assert found["slot/4"] == 12 - 2


@pytest.mark.extended
def test_each_worker_keeps_a_part_of_what_is_no_table():
    log = equals_one_process("hybrid21_shards", optimizer, name="adam_w").logs["worker-0"]
    # Two kernels and two biases.
    start = log.partition("'adam_w' in shares: the slots of 4 variables are cut")[2]
    parts = dict(re.findall(r"\n(?:.*\] )?(worker-\d) +[\d.]+ +(\d+)%", start)[:2])
    assert parts == {"worker-0": "50", "worker-1": "50"}
