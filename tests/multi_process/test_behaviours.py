"""What several workers do beyond equal numbers: layers, callbacks, files, refusals."""

import csv
import multiprocessing
import os
import pathlib
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

import keras_psplus as psp
from tests.support.cluster import makes_scope, run, strategy_of

pytestmark = pytest.mark.processes


def digits_like(rows=96, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, rows).astype("int32")
    return (rng.normal(size=(rows, 8)) + y[:, None]).astype("float32"), y


def classifier(scope, *layers, **kwargs):
    """A model of layers that functions make, in the scope."""
    with scope():
        model = keras.Sequential([keras.Input((8,)), *[make() for make in layers]])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], **kwargs)
    return model


def dense(units, **kwargs):
    return lambda: keras.layers.Dense(units, **kwargs)


def refused(message, function, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    assert message in str(error.value) and "Received: " in str(error.value), error.value


@makes_scope
def models_outside_the_scope(scope):
    strategy = strategy_of(scope)
    x, y = digits_like()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="forgotten")
    message = "The model 'forgotten' was built outside the strategy's scope"
    refused(message, model.compile, "sgd", "mse")
    with psp.single_process():
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for method in (model.fit, model.train_on_batch, model.evaluate, model.test_on_batch):
        refused(message, method, x, y)
    with psp.single_process():
        # Each worker by itself, at times of its own, and also while the strategy's model trains.
        if strategy.task.task_index == 0:
            model.fit(x, y, epochs=3, verbose=0)
        before = model.evaluate(x, y, verbose=0)
    student = classifier(scope, dense(4))

    class Baseline(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with psp.single_process():
                model.fit(x, y, verbose=0)

    student.fit(x, y, batch_size=20, verbose=0, callbacks=[Baseline()])
    with psp.single_process():
        after = model.evaluate(x, y, verbose=0)
    # Whether the context is there or not, a model of the scope is trained by the strategy.
    with psp.single_process():
        student.fit(x, y, batch_size=20, verbose=0)
    return student, {"losses": [before, after]}


@pytest.mark.extended
def test_a_model_of_one_process_is_its_own():
    first, second = run("ar2", models_outside_the_scope, same=False).values()
    for key in first.keys() - {"losses"}:
        np.testing.assert_array_equal(first[key], second[key])
    assert first["losses"][0] != second["losses"][0]
    for before, after in (first["losses"], second["losses"]):
        assert after < before


def operations(function, *args):
    """Kinds of the operations that TensorFlow runs for a function of the graph, and its result."""
    runtime = tf_context.context()
    runtime.enable_graph_collection()
    try:
        result = function(*args)
        graphs = runtime.export_run_metadata().function_graphs
    finally:
        runtime.disable_graph_collection()
    return {node.op for g in graphs for part in g.partition_graphs for node in part.node}, result


@makes_scope
def lookups(scope):
    strategy = strategy_of(scope)
    with scope():
        layer = keras.layers.Embedding(30, 4)
        layer.build()
        half = keras.layers.Embedding(30, 4, dtype="mixed_float16")
        half.build()
    table, ids = layer.embeddings, tf.constant([[3, -1], [3, 7]])

    @tf.function
    def looked_up(ids):
        def replica(ids):
            with tf.GradientTape() as tape:
                rows = layer(ids)
                loss = tf.reduce_sum(rows * rows)
            (gradient,) = tape.gradient(loss, [table.value])
            assert isinstance(gradient, tf.IndexedSlices), gradient
            short = tf.constant([2], tf.int16)
            direct = tf.gather(table.value, short), tf.gather_nd(table.value, [[5]])
            return rows, tf.convert_to_tensor(gradient), half(ids), *direct

        return strategy.run(replica, (ids,))

    whole = table.numpy()
    kinds, results = operations(looked_up, ids)
    assert "ResourceGather" in kinds and "ReadVariableOp" not in kinds, kinds
    rows, gradient, halves, row, element = results
    np.testing.assert_array_equal(rows, whole[ids.numpy()])
    np.testing.assert_array_equal(row, whole[[2]])
    np.testing.assert_array_equal(element, whole[[5]])
    assert halves.dtype == tf.float16
    np.testing.assert_array_equal(halves, half.embeddings.numpy()[ids.numpy()].astype("float16"))
    expected = np.zeros_like(whole)
    np.add.at(expected, ids.numpy(), 2 * whole[ids.numpy()])
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    # Outside of steps, too, and where a scope of Keras's gives another value.
    np.testing.assert_array_equal(layer(ids), whole[ids.numpy()])
    with keras.StatelessScope([(table, tf.ones((30, 4)))]):
        np.testing.assert_array_equal(layer(ids), np.ones((2, 2, 4)))
    return {"table": whole}


def test_lookups_read_rows():
    """Of an embedding's whole table, TensorFlow would make a copy in each step."""
    run("ar2", lookups)


class EndlessBatches(keras.utils.PyDataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return np.ones((4, 3)), np.ones((4, 1))


def forked_processes():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    time.sleep(0.5)
    process.terminate()
    process.join(30)
    assert process.exitcode == -signal.SIGTERM, process.exitcode
    data = EndlessBatches(workers=2, use_multiprocessing=True)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(data, epochs=1, steps_per_epoch=2, verbose=0)
    return model, {}


def test_forked_processes_end_when_terminated():
    """Those of a pool of Keras's that is stopped early, too, which nobody else could end."""
    run("ar2", forked_processes)


def dropout():
    masks = []

    class Probe(keras.layers.Layer):
        def call(self, x):
            def note(values):
                masks.append(values)
                return values

            return tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), x.shape)

    layers = [keras.Input((64,)), keras.layers.Dropout(0.5), Probe(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 64), "float32"), np.ones((8, 1)), batch_size=8, verbose=0)
    return {"mask": masks[0]}


def test_dropout_draws_a_mask_for_each_replica():
    first, second = (found["mask"] for found in run("ar2", dropout, same=False).values())
    assert first.shape == second.shape == (4, 64)
    assert not np.array_equal(first, second)


def callbacks_that_write(folder, is_shared):
    """A shared folder, and one of which each worker has its own."""
    folder = pathlib.Path(folder)
    options = {"delete_checkpoint": False}
    best = {"save_best_only": True, "save_weights_only": True}
    return [
        keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras")),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.TensorBoard(str(folder / "tb"), update_freq=1, histogram_freq=is_shared),
        keras.callbacks.BackupAndRestore(str(folder / "backup"), **options),
    ] + [keras.callbacks.ModelCheckpoint(str(folder / "best.weights.h5"), **best)] * is_shared


@makes_scope
def writing_callbacks(scope, folder):
    strategy = strategy_of(scope)
    model = classifier(scope, dense(8), dense(4))
    x, y = digits_like()
    options = {"batch_size": 20, "verbose": 0}
    shared = callbacks_that_write(f"{folder}/written", True)
    model.fit(x, y, epochs=3, validation_split=0.2, callbacks=shared, **options)
    # On a disk of its own, a worker that is not the chief writes nothing.
    own = pathlib.Path(folder, f"disk{strategy.task.task_index}")
    own.mkdir()
    model.fit(x, y, callbacks=callbacks_that_write(own, False), **options)
    return model, {}


def test_callbacks_write_once_from_the_chief(tmp_path):
    run("ar2", writing_callbacks, folder=str(tmp_path))
    folder = tmp_path / "written"
    assert sorted(p.name for p in folder.glob("*.keras")) == ["1.keras", "2.keras", "3.keras"]
    assert (folder / "best.weights.h5").exists()
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    with open(folder / "log.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert len(list(folder.glob("tb/train/*tfevents*"))) == 1
    assert (folder / "backup" / "LATEST").exists()
    assert len(list((tmp_path / "disk0").rglob("*"))) > 3
    assert [p for p in (tmp_path / "disk1").rglob("*") if p.is_file()] == []


@makes_scope
def save_and_load(scope, folder):
    strategy = strategy_of(scope)
    path = os.path.join(folder, "saved.keras")
    model = classifier(scope, dense(8), lambda: keras.layers.BatchNormalization(), dense(4))
    x, y = digits_like()
    model.fit(x, y, batch_size=20, verbose=0)
    model.save(path)
    model.save_weights(os.path.join(folder, "saved.weights.h5"))
    # Folders and several files are there when the call returns, too, whoever else writes them.
    exported, unzipped = (os.path.join(folder, name) for name in ("exported", "unzipped"))
    parts = os.path.join(folder, "of_parts.weights.json")
    for _ in range(2):
        model.export(exported, verbose=False)
        model.save(unzipped, zipped=False)
        model.save_weights(parts, max_shard_size=1)
        for name in (f"{exported}/saved_model.pb", f"{unzipped}/config.json", parts):
            assert os.path.exists(name), name
    # The other worker may be about to replace them by the same.
    strategy.extended.control.exchange("saved", "")
    exported, unzipped = tf.saved_model.load(exported), keras.models.load_model(unzipped)
    np.testing.assert_allclose(exported.serve(x), model.predict(x, verbose=0), atol=1e-6)
    np.testing.assert_array_equal(unzipped.get_weights()[0], model.get_weights()[0])
    unzipped.load_weights(parts)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    with scope():
        again = keras.models.load_model(path)
    np.testing.assert_array_equal(again.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0))
    again.fit(x, y, batch_size=20, verbose=0)
    again.load_weights(os.path.join(folder, "saved.weights.h5"))
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    alone = keras.models.load_model(path)
    np.testing.assert_allclose(alone.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    if strategy.task.task_index == 0:
        # The chief alone may save, too.
        model.save(os.path.join(folder, "chief.keras"))
        model.export(os.path.join(folder, "of_chief"), verbose=False)
    return model, {}


@pytest.mark.extended
def test_what_is_saved_is_loaded_by_the_job_and_by_one_process(tmp_path):
    run("ar2", save_and_load, folder=str(tmp_path))


@makes_scope
def one_worker_stops(scope):
    strategy = strategy_of(scope)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and strategy.task.task_index == 1:
                self.model.stop_training = True

    model = classifier(scope, dense(4))
    history = model.fit(*digits_like(), epochs=10, verbose=0, callbacks=[Stop()]).history
    return {"epochs": len(history["loss"])}


def test_a_stop_on_one_worker_stops_all():
    assert run("ar2", one_worker_stops).first["epochs"] == 3


@makes_scope
def own_loop(scope):
    """TensorFlow's custom training loop with Keras layers, metrics and optimizer."""
    strategy = strategy_of(scope)
    x, y = digits_like()
    with scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.Mean()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)

    @tf.function
    def train(batch):
        def step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                losses = loss_fn(y, model(x))
                loss = tf.reduce_sum(losses) / 32
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            metric.update_state(losses)

        strategy.run(step, args=(batch,))

    for batch in strategy.experimental_distribute_dataset(data):
        train(batch)
    return model, {"metric": metric.result(), "count": metric.count}


def test_a_loop_of_ones_own_counts_all_rows():
    assert run("ar2", own_loop).first["count"] == 96


class Critic(keras.Model):
    """Steps by an optimizer of its own, towards a teacher that it only calls."""

    def __init__(self, optimizer, teacher=None):
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.optimizers = lambda: [optimizer]
        self.teach = lambda x, y: y if teacher is None else teacher(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=self.teach(x, y), y_pred=self.dense(x))
        variables = self.trainable_variables
        self.optimizers()[0].apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@makes_scope
def optimizers_of_a_step(scope):
    """That of a teacher, which is made in one process and steps no more, may be outside."""
    x, y = digits_like()
    with psp.single_process():
        outside = keras.optimizers.SGD(name="critic")
        teacher = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        teacher.compile("sgd", "mse")
        teacher.fit(x, keras.utils.to_categorical(y, 4), verbose=0)
    with scope():
        model = Critic(outside)
        model.compile("sgd", "mse")
        student = Critic(keras.optimizers.SGD(), teacher)
        student.compile("sgd", "mse")
    refused("optimizer 'critic' was made outside the strategy's scope", model.fit, x, y)
    student.fit(x, y, batch_size=32, verbose=0)
    return student, {}


@makes_scope
def parts_outside_the_scope(scope):
    x, y = digits_like()
    with scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    outside, stray = keras.optimizers.SGD(), keras.metrics.Mean(name="stray")
    refused("outside the strategy's scope", model.compile, outside, "mse")
    refused("stray", model.compile, "sgd", "mse", metrics=[stray])
    layer = keras.layers.Dense(4)
    layer.build((None, 8))
    with scope():
        mixed = keras.Sequential([keras.Input((8,)), layer])
        mixed.compile("sgd", "mse")
    refused("kernel", mixed.fit, x, y)


@pytest.mark.parametrize("case", [optimizers_of_a_step, parts_outside_the_scope])
def test_parts_that_were_made_outside_of_the_scope_are_refused(case):
    run("ar2", case)
