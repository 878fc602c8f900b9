"""`DynamicEmbedding` in one process, by plain Keras."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.all_reduce.engine import AllReduceEngine
from keras_psplus.engine import Call
from keras_psplus.parameter_server.engine import ParameterServerEngine
from tests.hybrid import dynamic_cases
from tests.hybrid.models import initializer
from tests.support.tiers import extended

KEYS = np.array([7, -(2**61), 2**40, 123456789, 0], np.int64)


def layer(**options):
    options = {"initializer": keras.initializers.RandomUniform(-1, 1, seed=2), **options}
    return psp.layers.DynamicEmbedding(3, default="initializer", **options)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_rows_are_combined_in_every_form(combiner):
    table = layer(combiner=combiner)
    each = layer()(KEYS).numpy()
    groups, weights = [[0, 1, 1], [], [4, 2]], [[1.0, 2.0, 0.5], [], [3.0, 1.0]]
    expected = np.zeros([3, 3])
    for i, (group, own) in enumerate(zip(groups, weights)):
        if group:
            total = sum(w * each[j] for j, w in zip(group, own))
            by = {"sum": 1, "mean": sum(own), "sqrtn": np.sqrt(np.square(own).sum())}[combiner]
            expected[i] = total / by
    ids = tf.ragged.constant([[KEYS[j] for j in group] for group in groups], tf.int64)
    own = tf.ragged.constant(weights, tf.float32)
    for form in (lambda of: of, lambda of: of.to_sparse()):
        np.testing.assert_allclose(table(form(ids), form(own)), expected, atol=1e-5)
    dense = table(KEYS[[[0, 1, 1]]], np.array([weights[0]]))
    np.testing.assert_allclose(dense, expected[:1], atol=1e-5)


def test_a_tape_finds_gradients_of_rows_around_a_function():
    table, ids = layer(), KEYS[[0, 1, 1]]
    table(ids, training=True)
    found = []
    for call in (table, tf.function(table)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(ids) ** 2)
        slices = tape.gradient(loss, table.trainable_variables)[0]
        order = np.argsort(slices.indices)
        found.append((slices.indices.numpy()[order], slices.values.numpy()[order]))
    assert len(found[0][0]) == 2
    for eager, around in zip(*found):
        np.testing.assert_allclose(around, eager, rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combiners_leave_padding_out(combiner):
    table, plain = layer(combiner=combiner, mask_value=0), layer(combiner=combiner)
    own = tf.ragged.constant([[[1, 2], [3]], [[], [4, 5, 6]]], tf.int64)
    padded = own.to_tensor()
    expected = plain(own).to_tensor()
    np.testing.assert_allclose(table(padded), expected, atol=1e-6)
    np.testing.assert_array_equal(table(padded)._keras_mask, [[True, True], [False, True]])
    weights = tf.reshape(tf.range(12, dtype=tf.float32) + 1, [2, 2, 3])
    by_weight = plain(own, tf.ragged.boolean_mask(weights, padded != 0)).to_tensor()
    sparse = tf.sparse.from_dense(padded + 9)
    for ids, of_ids in (
        (padded, weights),
        (sparse.with_values(sparse.values - 9), tf.sparse.from_dense(weights)),
    ):
        np.testing.assert_allclose(table(ids, of_ids), by_weight, atol=1e-6)
    ragged, of_ragged = (tf.RaggedTensor.from_tensor(of, ragged_rank=2) for of in (padded, weights))
    np.testing.assert_allclose(table(ragged, of_ragged).to_tensor(), by_weight, atol=1e-6)
    assert table.compute_mask(padded[0]) is None


@pytest.mark.parametrize("is_text", [True, *extended(False)])
def test_padded_sequences_equal_those_of_an_embedding_with_mask_zero(is_text):
    keys, x, _ = dynamic_cases.sequences()
    start = layer(initializer=initializer(7))
    start.dim = dynamic_cases.DIM
    rows = start(tf.constant(keys if not is_text else keys.astype(str))).numpy()
    embedding = keras.layers.Embedding(
        len(keys), dynamic_cases.DIM, keras.initializers.Constant(rows), mask_zero=True
    )
    expected = dynamic_cases.train_sequences(embedding=embedding)
    found = dynamic_cases.train_sequences(is_text)
    for what in expected:
        np.testing.assert_allclose(found[what], expected[what], atol=1e-5, err_msg=what)
    assert len(found["table_keys"]) == len(np.unique(x)) - 1


def test_regularizers_and_constraints_equal_those_of_an_embedding():
    options = {
        "embeddings_regularizer": keras.regularizers.L2(0.1),
        "embeddings_constraint": keras.constraints.MaxNorm(0.8, axis=1),
    }
    # In each batch are all rows, which are those of a step.
    x = np.stack([np.random.default_rng(i).permutation(12) for i in range(3)])
    rows, results = layer(**options)(np.arange(12)).numpy(), []
    assert np.isclose(np.linalg.norm(rows, axis=1), 0.8).sum() > 3
    start = keras.initializers.Constant(rows)
    for table in (layer(**options), keras.layers.Embedding(12, 3, start, **options)):
        model = keras.Sequential([keras.Input((12,), dtype="int64"), table])
        model.compile(keras.optimizers.Adam(0.2), "mse")
        model.fit(x, np.ones([3, 12, 3]), batch_size=1, shuffle=False, verbose=0)
        results.append(model.predict(np.arange(12)[np.newaxis], verbose=0))
    np.testing.assert_allclose(*results, atol=1e-5)


def test_strings_have_rows_of_their_fingerprints():
    table = layer()
    rows = table(tf.constant([["a", "b"], ["b", ""]])).numpy()
    np.testing.assert_array_equal(rows[0, 1], rows[1, 0])
    assert len(np.unique(rows.reshape(-1, 3), axis=0)) == 3
    ragged = table(tf.ragged.constant([["a"], ["b", ""]]))
    np.testing.assert_array_equal(ragged.flat_values, rows.reshape(-1, 3)[[0, 1, 3]])


def test_rows_are_made_by_training_alone_and_saved(tmp_path):
    keras.utils.set_random_seed(0)
    ids = keras.Input((2,), dtype="int64")
    options = {"admit": psp.tables.Count(2), "expire": psp.tables.Unused(steps=9)}
    table = psp.layers.DynamicEmbedding(3, combiner="sum", initializer="normal", **options)
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    model.compile(keras.optimizers.Adam(0.1, clipnorm=1.0), "mse")
    x, y = KEYS[[[0, 1], [1, 2]]], np.ones((2, 1))
    model.evaluate(x, y, verbose=0)
    assert not model.predict(x, verbose=0).any() and not len(table.keys)
    model.train_on_batch(x, y)
    assert not len(table.keys)
    model.train_on_batch(x, y)
    assert sorted(table.keys) == sorted(KEYS[:3])
    for count, last in zip(*table.counts()):
        assert (count, last) == (2, 2)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, again):
        one.train_on_batch(KEYS[[[2, 3], [3, 3]]], y)
        one.train_on_batch(x, y)
    assert again.layers[1].counts()[0].tolist() == table.counts()[0].tolist() == [3, 3, 4]
    for one, other in zip(
        [*model.weights, *model.optimizer.variables],
        [*again.weights, *again.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)


def test_a_table_is_moved_into_another():
    ids, tables, x = keras.Input((2,), dtype="int64"), [], KEYS[[[0, 1], [1, 2], [3, 4]]]
    for _ in range(2):
        table = layer(combiner="sum", admit=psp.tables.Count(2))
        kernel = keras.initializers.GlorotUniform(1)
        model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer=kernel)(table(ids)))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        tables.append((model, table))
    (model, table), (other, copy) = tables
    for _ in range(3):
        model.train_on_batch(x, np.ones([3, 1]))
    other.layers[-1].set_weights(model.layers[-1].get_weights())
    variables = zip(model.optimizer.variables, other.optimizer.variables)
    for one, of_copy in [pair for pair in variables if pair[0].shape != (0, 3)]:
        of_copy.assign(one)
    slots = [np.asarray(of) for of in model.optimizer.variables if of.shape == (0, 3)]
    # In the order of `keys`.
    copy.insert(table.keys, table.table.numpy(), slots, table.counts()[0])
    for one in (model, other):
        one.train_on_batch(x, np.ones([3, 1]))
    np.testing.assert_array_equal(copy.keys, table.keys)
    np.testing.assert_array_equal(copy.counts()[0], table.counts()[0])
    np.testing.assert_allclose(copy.table.numpy(), table.table.numpy(), atol=1e-6)

    copy.remove([7, 8])
    copy.insert(tf.constant(["a", "b"]), np.ones([2, 3]))
    assert 7 not in copy.keys and len(copy.keys) == 6 and copy.counts()[0].min() == 1
    np.testing.assert_array_equal(copy(tf.constant([["b"]])), [[1, 1, 1]])
    assert sum(len(keys) for keys, _ in copy.items(4)) == 6
    copy.clear()
    assert not len(copy.keys) and not list(copy.items())
    ones = np.ones([2, 3])
    for args, received in (
        (([1, 1], ones), "keys of shape"),
        (([1], ones), "rows and slots of shapes"),
        (([1, 2], ones, [ones]), "rows and slots of shapes"),
        (([1, 2], ones, None, [0, 1]), "counts of shape"),
    ):
        with pytest.raises(ValueError, match=f"Received: .*{received}"):
            copy.insert(*args)
    with pytest.raises(ValueError, match="Received: a layer that is not built"):
        layer().clear()
    with pytest.raises(ValueError, match="Received: a call inside of a graph"):
        tf.function(lambda: copy.remove([1]))()


@pytest.mark.extended
def test_a_checkpoint_has_the_keys(tmp_path):
    models = []
    for ids in (KEYS[:4], KEYS[1:]):
        ids_in = keras.Input((2,), dtype="int64")
        table = layer(combiner="sum", admit=psp.tables.Count(2), name="t")
        model = keras.Model(ids_in, keras.layers.Dense(1)(table(ids_in)))
        model.compile("adam", "mse")
        for some in (ids, ids, ids[::-1] + 1):
            model.train_on_batch(some.reshape(2, 2), np.ones([2, 1]))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        models.append((model, table, checkpoint))
    (one, table, checkpoint), (other, copy, again) = models
    again.restore(checkpoint.save(tmp_path / "checkpoint")).assert_consumed()
    np.testing.assert_array_equal(copy.keys, table.keys)
    assert len(copy._snapshot().candidates) == 4
    for a, b in zip(
        [*one.weights, *one.optimizer.variables],
        [*other.weights, *other.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.extended
def test_a_step_of_an_earlier_optimizer_is_refused():
    ids = keras.Input((2,), dtype="int64")
    table = layer(combiner="sum")
    rows = table(ids)
    models = [keras.Model(ids, keras.layers.Dense(1)(rows)) for _ in range(2)]
    x, y = KEYS[[[0, 1], [1, 2]]], np.ones([2, 1])
    for model, optimizer in zip(models, ("adam", "sgd")):
        model.compile(optimizer, "mse")
        model.train_on_batch(x, y)
    before = table.table.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Compile the model again before it"):
        models[0].train_on_batch(x, y)
    np.testing.assert_array_equal(table.table.numpy(), before)
    models[0].compile("adam", "mse")
    models[0].train_on_batch(x, y)
    assert table.counts()[0].tolist() == [3, 3, 3]


@pytest.mark.extended
def test_slots_of_a_file_go_with_its_keys(tmp_path):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            # A file has the optimizer before it.
            self.table = layer(combiner="sum")
            self.dense = keras.layers.Dense(1)

        def call(self, ids, training=False):
            return self.dense(self.table(ids, training=training))

    models, x = [Model(), Model()], KEYS[[[0, 1], [1, 2]]]
    for model, ids in zip(models, (x, x + 1)):
        model.compile("adagrad", "mse")
        model.fit(ids, np.ones([2, 1]), epochs=3, verbose=0)
    one, other = models
    one.save_weights(tmp_path / "one.weights.h5")
    # As many keys, but others.
    other.load_weights(tmp_path / "one.weights.h5")
    np.testing.assert_array_equal(other.table.keys, one.table.keys)
    for a, b in zip(one.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=1e-6)


class Subclassed(keras.Model):
    """A model whose layers are built when it is called."""

    def __init__(self):
        super().__init__()
        self.table = psp.layers.DynamicEmbedding(2, combiner="mean", name="t")
        self.out = keras.layers.Dense(1)

    def call(self, ids, training=False):
        return self.out(self.table(ids, training=training))


@pytest.mark.extended
def test_a_model_is_built_by_its_shapes_as_under_a_strategy():
    model, ids = Subclassed(), np.arange(6).reshape(2, 3)
    model.compile("sgd", "mse")
    model._symbolic_build(data_batch=(ids, np.ones((2, 1))))
    assert model.out.kernel.shape == (2, 1)
    model.fit(ids, np.ones((2, 1)), verbose=0)
    assert model.table.keys.tolist() == [0, 1, 2, 3, 4, 5]


def test_no_integer_is_reserved(tmp_path):
    ends = [-(2**63), -(2**63) + 1, -1, 0, 2**63 - 2, 2**63 - 1]
    ids, results = keras.Input((2,), dtype="int64"), []
    for x in (np.array(ends), np.arange(6)):
        table = psp.layers.DynamicEmbedding(
            3, initializer="ones", expire=psp.tables.Unused(steps=4), admit=psp.tables.Count(2)
        )
        head = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(1))
        model = keras.Model(ids, head(keras.layers.Flatten()(table(ids))))
        model.compile("adagrad", "mse")
        x = x.reshape(3, 2)
        first, last, middle = x[[0, 1, 0]], x[[1, 2, 1]], x[[1, 1, 1]]
        for some in (x, x, first, last, last, last, middle, x, x):
            model.train_on_batch(some, np.ones([3, 1]))
        assert table.keys.tolist() == np.unique(x).tolist()
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        results.append([table.table.numpy(), table.counts(), again.predict(x, verbose=0)])
        assert again.layers[1].keys.tolist() == table.keys.tolist()
    for of_ends, of_others in zip(*results):
        np.testing.assert_allclose(of_ends, of_others, atol=1e-6)


def test_a_table_that_is_not_trained_gets_no_rows():
    ids = keras.Input((2,), dtype="int64")
    table = psp.layers.DynamicEmbedding(3, combiner="sum", trainable=False)
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    model.compile("sgd", "mse")
    model.fit(KEYS[[[0, 1]]], np.ones([1, 1]), verbose=0)
    assert not len(table.keys) and not table(KEYS[[[0, 1]]], training=True).numpy().any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="Received: dtype=float32"):
        layer()(np.zeros([2], np.float32))
    with pytest.raises(ValueError, match="Received: combiner='max'"):
        layer(combiner="max")
    with pytest.raises(ValueError, match="Received: initializer=.*Orthogonal"):
        layer(initializer=keras.initializers.Orthogonal())
    with pytest.raises(ValueError, match="has no `max_norm`: use `embed.*Received: max_norm=2"):
        layer(max_norm=2)
    with pytest.raises(ValueError, match="takes each row by itself.*Received: Orthogonal"):
        layer(embeddings_regularizer="orthogonal_regularizer")
    with pytest.raises(ValueError, match="single rows of a table.*NonNeg.*Received: UnitNorm"):
        layer(embeddings_constraint="unit_norm")
    with pytest.raises(ValueError, match="Received: mask_value=0.5"):
        layer(mask_value=0.5)
    with pytest.raises(ValueError, match="Received: mask_value='' with ids of type int64"):
        layer(mask_value="")(KEYS)
    with pytest.raises(ValueError, match="Received: combiner=None"):
        layer()(tf.sparse.from_dense([[1, 0]]))

    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = layer(name="t"), layer(name="t")

        def call(self, ids):
            return self.first(ids) + self.second(ids)

    model = Twice()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Two tables of a model.*Received: .*t/table"):
        model.fit(KEYS, np.zeros([5, 3]), verbose=0)


def test_features_of_keras_rs_share_a_table_in_files_too(tmp_path):
    rs = pytest.importorskip("keras_rs").layers
    table = layer(combiner="sum", name="items")

    def feature(name, *length):
        return rs.FeatureConfig(name, table, (None, *length), (None, 3))

    embedding = rs.DistributedEmbedding({"two": feature("two", 2), "one": feature("one")})
    ids = keras.Input((3,), dtype="int64")
    found = embedding({"two": ids[:, :2], "one": ids[:, 2]})
    model = keras.Model(ids, found["two"] - found["one"])
    model.compile("sgd", "mse")
    model.fit(KEYS[[[0, 1, 2], [2, 1, 3]]], np.ones([2, 3]), verbose=0)
    assert sorted(table.keys) == sorted(KEYS[:4])
    rows = table(KEYS[:4, np.newaxis]).numpy()
    x = KEYS[[[0, 1, 3]]]
    np.testing.assert_allclose(model.predict(x, verbose=0)[0], rows[0] + rows[1] - rows[3], 1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))

    with pytest.raises(ValueError, match="have keys, and are no matrix.*Received: 'items'"):
        embedding.get_embedding_tables()
    other = rs.FeatureConfig("other", layer(), (None, 2), (None, 3))
    with pytest.raises(ValueError, match="combines the rows of each example.*Received: combiner"):
        rs.DistributedEmbedding({"other": other})


def test_weights_are_set_for_the_keys_that_there_are():
    model = keras.Sequential([keras.Input((3,), dtype="int64"), psp.layers.DynamicEmbedding(4)])
    model.compile("sgd", "mse")
    x = np.arange(12).reshape(4, 3)
    model.fit(x, np.ones((4, 3, 4)), verbose=0)
    before = model.get_weights()
    model.fit(x, np.ones((4, 3, 4)), verbose=0)
    assert not np.allclose(model.get_weights()[0], before[0])
    model.set_weights(before)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    with pytest.raises(ValueError, match="is not compatible with provided weight"):
        model.set_weights([np.zeros((12, 5), "float32")])
    layer, counts = model.layers[0], model.layers[0].counts()
    model.fit(x + 100, np.ones((4, 3, 4)), verbose=0)
    with pytest.raises(ValueError, match="load a file that.*Received: an array of shape"):
        model.set_weights([before[0] + 0])
    # They know their keys.
    model.set_weights(before)
    assert layer.keys.tolist() == x.ravel().tolist()
    np.testing.assert_array_equal(layer.table.numpy(), before[0])
    assert layer.counts()[0].max() == 1 and counts[0].max() == 2
    model.fit(x, np.ones((4, 3, 4)), verbose=0)


@pytest.mark.extended
def test_early_stopping_goes_back_to_earlier_keys(tmp_path):
    ids, losses = np.arange(54).reshape(18, 3), np.repeat([[3.0], [1], [2], [4], [5], [6]], 3, 0)
    data = tf.data.Dataset.from_tensor_slices((ids, losses)).batch(3)

    class BreakOff(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 3:
                raise InterruptedError

    def train(*callbacks):
        keras.utils.set_random_seed(1)
        with psp.HybridStrategy().scope():
            layers = [keras.Input((3,), dtype="int64"), layer(), keras.layers.Flatten()]
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile("adam", lambda y, outputs: tf.cast(y, tf.float32) + 0 * outputs)
        stop = keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)
        callbacks = [stop, *callbacks]
        model.fit(data, steps_per_epoch=1, epochs=6, verbose=0, callbacks=callbacks)
        return model.layers[0]

    expected = train()
    assert expected.keys.tolist() == list(range(18))
    # The backup has the keys of the best epoch, and those of the last.
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(InterruptedError):
        train(backup, BreakOff())
    found = train(keras.callbacks.BackupAndRestore(tmp_path / "backup"))
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_allclose(found.table.numpy(), expected.table.numpy(), atol=1e-6)


@pytest.mark.parametrize("argument", ["cache", "updates"])
def test_parameter_servers_say_what_does_not_go_with_a_table(argument):
    given = {"cache": None, "updates": None, argument: 3}
    context = types.SimpleNamespace(scheduler=None)
    members = {"updates": given["updates"], "_context": context}
    strategy = type("Strategy", (), members)()
    engine = ParameterServerEngine(strategy)
    variable, spec = types.SimpleNamespace(path="ids/table"), {"cache": given["cache"]}
    call = Call(lambda *_: None, variable, (spec,), {}, "make_table", engine, ["spec"])
    with pytest.raises(ValueError, match=f"Received: {argument}=3 with the table 'ids/table'"):
        engine.make_variable(call)


def test_strategies_without_servers_name_those_with_some():
    variable, strategy = types.SimpleNamespace(path="ids/table"), type("Mirrored", (), {})()
    engine = AllReduceEngine(strategy)
    call = Call(lambda *_: None, variable, ({},), {}, "make_table", engine, ["spec"])
    instead = "Mirrored has no.*HybridStrategy or Param.*, or one process.*Received: .* 'ids/table'"
    with pytest.raises(ValueError, match=instead):
        engine.make_variable(call)
