"""What several workers must do beyond equal numbers: data, callbacks, files, refusals.

Run as a script in every worker of a cluster. Each behaviour returns arrays, which are written to
`<out>/<behaviour>.<task>.npz` and looked at by `test_behaviours.py`, or raises.
"""

import argparse
import multiprocessing
import os
import pathlib
import signal
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

import keras_psplus as psp
from keras_psplus.core.batch import replica_step as step_module

BEHAVIOURS = {}


class Context:
    """What a behaviour gets.

    Attributes:
        strategy: The strategy.
        index: This worker's index.
        folder: A folder that all workers share.
        service: Address of a dispatcher of the tf.data service.
    """

    def __init__(self, strategy, folder, service):
        self.strategy = strategy
        self.index = strategy.task.task_index
        self.folder = folder
        self.service = service


def behaviour(function):
    BEHAVIOURS[function.__name__] = function
    return function


class Watching(keras.Model):
    """A linear model that notes the ids (its first feature) that each step of it sees."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x[:, 1:])

    def train_step(self, data):
        def note(ids):
            self.seen.append(ids.astype("int64"))
            return np.int32(0)

        # Not the row of a worker that has run out of data.
        ids = step_module.current_step().rows_if_any(data[0][:, 0])
        noted = tf.numpy_function(note, [ids], tf.int32)
        with tf.control_dependencies([noted]):
            return super().train_step(data)


def numbered(rows, first=0):
    x = np.ones((rows, 3), "float32")
    x[:, 0] = np.arange(first, first + rows)
    return x, np.ones((rows, 1), "float32")


def watch(context, *args, epochs=2, compile_options=None, **kwargs):
    """Fits and returns the ids seen in each epoch by this worker."""
    with context.strategy.scope():
        model = Watching()
        model.compile("sgd", "mse", **(compile_options or {}))
    epoch_starts = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epoch_starts.append(len(model.seen))
    )
    model.fit(*args, epochs=epochs, verbose=0, callbacks=[note], **kwargs)
    ends = epoch_starts[1:] + [len(model.seen)]
    return {
        f"epoch{i}": np.concatenate(model.seen[a:b]) if b > a else np.zeros(0, "int64")
        for i, (a, b) in enumerate(zip(epoch_starts, ends, strict=True))
    }


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


@behaviour
def models_outside_the_scope(context):
    """Before any other model: the strategy counts from when it is made, not from its first one."""
    x, y = digits_like()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="forgotten")
    part = "The model 'forgotten' was built outside the strategy's scope"
    refusal(ValueError, part, lambda: model.compile("sgd", "mse"))
    with psp.single_process():
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    refusal(ValueError, part, lambda: model.fit(x, y, verbose=0))
    refusal(ValueError, part, lambda: model.train_on_batch(x, y))
    refusal(ValueError, part, lambda: model.evaluate(x, y, verbose=0))
    refusal(ValueError, part, lambda: model.test_on_batch(x, y))
    with psp.single_process():
        # Each worker by itself, at times of its own, and also while the strategy's model trains.
        if context.index == 0:
            model.fit(x, y, epochs=3, verbose=0)
        before = model.evaluate(x, y, verbose=0)
    student = classifier(context, dense(4))

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
    return weights_of(student) | {"losses": np.asarray([before, after])}


@behaviour
def lookups_read_rows(context):
    """Of an embedding's whole table, TensorFlow would make a copy in each step."""
    with context.strategy.scope():
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

        return context.strategy.run(replica, (ids,))

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
    return {"weights/table": whole}


class EndlessBatches(keras.utils.PyDataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return numbered(4)


@behaviour
def forked_processes_end_when_terminated(context):
    """Those of a pool of Keras's that is stopped early, too, which nobody else could end."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=time.sleep, args=(600,))
    process.start()
    time.sleep(0.5)
    process.terminate()
    process.join(30)
    assert process.exitcode == -signal.SIGTERM, process.exitcode
    data = EndlessBatches(workers=2, use_multiprocessing=True)
    with context.strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data, epochs=1, steps_per_epoch=2, verbose=0)
    return weights_of(model)


@behaviour
def shuffled_arrays(context):
    return watch(context, *numbered(103), batch_size=10)


@behaviour
def arrays_shuffled_by_batch(context):
    return watch(context, *numbered(103), batch_size=10, shuffle="batch")


@behaviour
def unseeded_dataset(context):
    tf.random.set_seed(None)  # or shuffle() would draw its seed from the global one
    data = tf.data.Dataset.from_tensor_slices(numbered(103)).shuffle(60).batch(10)
    return watch(context, data)


@behaviour
def unseeded_dataset_with_cache_and_repeat(context):
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(numbered(100)).cache().shuffle(100)
    return watch(context, data.repeat().batch(10), steps_per_epoch=10)


@behaviour
def maps_of_own_rows(context):
    """By pipeline, the ids that this worker has mapped, beside those that it has seen."""
    policy = tf.data.experimental.AutoShardPolicy
    mapped = []

    def note(x, y):
        mapped.append(int(x[0]))
        return x, y

    def noted(data, **options):
        types = [part.dtype for part in data.element_spec]

        def noting(x, y):
            x_after, y_after = tf.numpy_function(note, [x, y], types, **options)
            return tf.ensure_shape(x_after, x.shape), tf.ensure_shape(y_after, y.shape)

        return data.map(noting, num_parallel_calls=2)

    def by_generator():
        spec = tf.TensorSpec([3]), tf.TensorSpec([1])
        generator = lambda: zip(*numbered(103), strict=True)  # noqa: E731
        return tf.data.Dataset.from_generator(generator, output_signature=spec)

    def with_policy(data):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy.DATA
        return data.with_options(options)

    slices = tf.data.Dataset.from_tensor_slices(numbered(103))
    tf.random.set_seed(None)
    pipelines = {
        "shuffled": noted(slices.shuffle(60), stateful=False).batch(10).prefetch(2),
        "generated": noted(by_generator(), stateful=False).batch(10),
        "trusted": with_policy(noted(slices).batch(10)),
        "unknown": noted(slices).batch(10),
    }
    results = {}
    for name, data in pipelines.items():
        mapped.clear()
        seen = watch(context, data, epochs=1)["epoch0"]
        results |= {f"{name}/mapped": np.unique(mapped), f"{name}/seen": np.unique(seen)}
    return results


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return numbered(10 if index < 10 else 3, 10 * index)


@behaviour
def shuffled_py_dataset(context):
    return watch(context, Numbered(), shuffle=True)


@behaviour
def files_shared_out(context):
    folder = pathlib.Path(context.folder, "records")
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"{i}.txt") for i in range(3)]
    for i, path in enumerate(paths):
        # Each worker writes the same files, so that none has to wait for another.
        own = pathlib.Path(f"{path}.{context.index}")
        own.write_text("".join(f"{n}\n" for n in range(i * 20, i * 20 + 20 - i)))
        os.replace(own, path)

    def parse(line):
        x = tf.stack([tf.strings.to_number(line), 1.0, 1.0])
        return x, tf.ones([1])

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    data = tf.data.Dataset.from_tensor_slices(paths).interleave(tf.data.TextLineDataset)
    return watch(context, data.map(parse).batch(10).with_options(options))


@behaviour
def own_shares_of_unequal_length(context):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    rows = (40, 75, 5)[context.index]
    data = tf.data.Dataset.from_tensor_slices(numbered(rows, 1000 * context.index))
    return watch(context, data.batch(10).with_options(options))


LENGTHS = ((40, 75, 9), (20, 5, 48))


def changing_lengths(rows_by_epoch):
    """A dataset that has another number of rows each time it is read."""
    epochs = iter(rows_by_epoch)

    def rows():
        epoch, rows = next(epochs)
        yield from zip(*numbered(rows, 1000 * epoch), strict=True)

    spec = tf.TensorSpec([3]), tf.TensorSpec([1])
    return tf.data.Dataset.from_generator(rows, output_signature=spec).batch(10)


@behaviour
def own_shares_of_changing_length(context):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = changing_lengths(enumerate(LENGTHS[context.index], 10 * context.index))
    return watch(context, data.with_options(options), epochs=3)


@behaviour
def dataset_of_changing_length(context):
    return watch(context, changing_lengths(enumerate((23, 103, 7))), epochs=3)


@behaviour
def changing_length_in_several_steps(context):
    return watch(
        context,
        changing_lengths(enumerate((23, 103, 7))),
        epochs=3,
        compile_options={"steps_per_execution": 3},
    )


def service_dataset(context, job_name, mode="distributed_epoch", rows=203, **kwargs):
    """A dataset of batches in an order of each reading, from the tf.data service."""
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(numbered(rows)).shuffle(rows).batch(8)
    distribute = tf.data.experimental.service.distribute
    return data.apply(distribute(mode, context.service, job_name=job_name, **kwargs))


@behaviour
def data_service(context):
    validation = service_dataset(context, "validation", rows=50)
    data = service_dataset(context, "train", rows=640)
    return watch(context, data, epochs=4, validation_data=validation)


@behaviour
def data_service_in_functions(context):
    data = tf.data.Dataset.range(1).flat_map(lambda _: service_dataset(context, "in functions"))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return watch(context, data.with_options(options), epochs=1)


@behaviour
def data_service_with_jobs_of_its_own(context):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return watch(context, service_dataset(context, None).with_options(options), epochs=1)


@behaviour
def data_service_refusals(context):
    def refused(part, data, **kwargs):
        refusal(ValueError, part, lambda: watch(context, data, **kwargs))

    refused("without a `job_name`", service_dataset(context, None))
    refused("without a `job_name`", service_dataset(context, None).repeat(), steps_per_epoch=3)
    refused("from different jobs", service_dataset(context, f"job {context.index}"))
    refused("'parallel_epochs'", service_dataset(context, "parallel", "parallel_epochs"))
    turns = {"consumer_index": 0, "num_consumers": 2}
    refused("a `consumer_index` each", service_dataset(context, "turns", **turns))
    watch(context, service_dataset(context, "over"), epochs=1)
    refused("The epoch had no batch", service_dataset(context, "over"))
    return {}


@behaviour
def batch_sizes_that_differ(context):
    size = (10, 20, 20)[context.index]
    x, y = numbered(60)
    both = r"(worker-0: batch_size=10; worker-1: batch_size=20)"
    refusal(ValueError, both, lambda: watch(context, x, y, batch_size=size))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size).map(lambda x, y: (x, y))
    refusal(ValueError, "AutoShardPolicy.OFF", lambda: watch(context, data))
    batches = Numbered()
    batches.batch_size = size
    refusal(ValueError, both, lambda: watch(context, batches))
    return {}


@behaviour
def arrays_of_unequal_length(context):
    rows = (40, 75, 5)[context.index]
    return watch(context, *numbered(rows, 1000 * context.index), batch_size=10, shuffle=False)


def small_images(mine):
    """Ten images of a size that the graph does not know, or some of them, and their labels."""
    x = np.random.default_rng(5).normal(size=(10, 5, 5, 1)).astype("float32")
    y = x.mean((1, 2))
    data = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(4)

    def of_unknown_size(x, y):
        return tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, None, None, 1]), y

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return x, y, data.map(of_unknown_size).with_options(options)


def convolution(synchronized):
    inputs = keras.Input((None, None, 1))
    maps = keras.layers.Conv2D(3, 3, activation="relu")(inputs)
    maps = keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.5)(maps)
    rows = keras.layers.GlobalAveragePooling2D()(maps)
    return keras.Model(inputs, keras.layers.Dense(1)(rows))


@behaviour
def convolutions_of_shares_of_unequal_length(context):
    """One worker has seven rows and one has three: after two of four steps, it has none."""
    x, y, data = small_images(slice(0, 7) if context.index == 0 else slice(7, 10))
    with context.strategy.scope():
        model = convolution(synchronized=True)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    # The batches of both together, and one process by hand.
    steps = [0, 1, 7, 8], [2, 3, 9], [4, 5], [6]
    alone = convolution(synchronized=False)
    alone.set_weights(model.get_weights())
    losses = []
    for rows in (rows for _ in range(2) for rows in steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(alone(x[rows], training=True) - y[rows]))
        for variable, gradient in zip(
            alone.trainable_variables, tape.gradient(loss, alone.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        losses += [float(loss)] * len(rows)
    history = model.fit(data, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["loss"], np.mean(np.split(np.array(losses), 2), 1), 1e-4)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    order = np.concatenate(steps)
    errors = alone(x).numpy() - y
    evaluated = model.evaluate(data, verbose=0)
    np.testing.assert_allclose(evaluated, [np.mean(errors**2), np.mean(abs(errors))], rtol=1e-4)
    predicted = model.predict(data.map(lambda x, y: x), verbose=0)
    np.testing.assert_allclose(predicted, (errors + y)[order], rtol=1e-4, atol=1e-5)
    return weights_of(model)


def digits_like(rows=96, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, rows).astype("int32")
    return (rng.normal(size=(rows, 8)) + y[:, None]).astype("float32"), y


def classifier(context, *layers, **kwargs):
    with context.strategy.scope():
        model = keras.Sequential([keras.Input((8,)), *[make() for make in layers]])
        model.compile(
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **kwargs,
        )
    return model


def dense(units, **kwargs):
    return lambda: keras.layers.Dense(units, **kwargs)


def weights_of(model):
    return {f"weights/{i}": w for i, w in enumerate(model.get_weights())}


@behaviour
def dropout_draws_a_mask_for_each_replica(context):
    masks = []

    class Probe(keras.layers.Layer):
        def call(self, x):
            def note(values):
                masks.append(values)
                return values

            return tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), x.shape)

    with context.strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dropout(0.5), Probe(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 64), "float32"), np.ones((8, 1)), batch_size=8, verbose=0)
    return {"mask": masks[0]}


@behaviour
def noise_is_reproducible(context):
    weights = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        model = classifier(
            context,
            lambda: keras.layers.GaussianNoise(0.1),
            dense(16, activation="relu"),
            lambda: keras.layers.Dropout(0.5),
            dense(4),
        )
        model.fit(*digits_like(), batch_size=20, epochs=2, verbose=0)
        weights.append(model.get_weights())
    return {f"{run}/{i}": w for run in (0, 1) for i, w in enumerate(weights[run])}


@behaviour
def batch_normalisation_averages(context):
    model = classifier(
        context, dense(8), lambda: keras.layers.BatchNormalization(momentum=0.5), dense(4)
    )
    # The last batch has one row, so that one replica's statistics are those of no rows.
    model.fit(*digits_like(101), batch_size=20, epochs=2, verbose=0)
    return weights_of(model)


@behaviour
def frozen_layers_are_not_sent(context):
    model = classifier(context, dense(16), dense(4))
    model.layers[0].trainable = False
    before = model.layers[0].get_weights()[0]
    with context.strategy.scope():
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*digits_like(), batch_size=20, verbose=0)
    np.testing.assert_array_equal(before, model.layers[0].get_weights()[0])
    return weights_of(model)


class Interrupted(Exception):
    pass


@behaviour
def writing_callbacks(context):
    folder = pathlib.Path(context.folder, "written")
    model = classifier(context, dense(8), dense(4))
    x, y = digits_like()
    model.fit(
        x,
        y,
        batch_size=20,
        epochs=3,
        verbose=0,
        validation_split=0.2,
        callbacks=[
            keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras")),
            keras.callbacks.ModelCheckpoint(
                str(folder / "best.weights.h5"), save_best_only=True, save_weights_only=True
            ),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.TensorBoard(str(folder / "tb"), update_freq=1, histogram_freq=1),
            keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
        ],
    )
    # On a disk of its own, a worker that is not the chief writes nothing.
    own = pathlib.Path(context.folder, f"disk{context.index}")
    own.mkdir()
    model.fit(
        x,
        y,
        batch_size=20,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(str(own / "a.keras")),
            keras.callbacks.CSVLogger(str(own / "log.csv")),
            keras.callbacks.TensorBoard(str(own / "tb")),
            keras.callbacks.BackupAndRestore(str(own / "backup"), delete_checkpoint=False),
        ],
    )
    return weights_of(model)


@behaviour
def save_and_load(context):
    path = os.path.join(context.folder, "saved.keras")
    model = classifier(context, dense(8), lambda: keras.layers.BatchNormalization(), dense(4))
    x, y = digits_like()
    model.fit(x, y, batch_size=20, verbose=0)
    model.save(path)
    model.save_weights(os.path.join(context.folder, "saved.weights.h5"))
    # Folders and several files are there when the call returns, too, whoever else writes them.
    folders = [os.path.join(context.folder, name) for name in ("exported", "unzipped")]
    for _ in range(2):
        model.export(folders[0], verbose=False)
        model.save(folders[1], zipped=False)
        model.save_weights(os.path.join(context.folder, "of_parts.weights.json"), max_shard_size=1)
        for name in ("exported/saved_model.pb", "unzipped/config.json", "of_parts.weights.json"):
            assert os.path.exists(os.path.join(context.folder, name)), name
    # The other worker may be about to replace them by the same.
    context.strategy.extended.control.exchange("saved", "")
    exported, unzipped = tf.saved_model.load(folders[0]), keras.models.load_model(folders[1])
    np.testing.assert_allclose(exported.serve(x), model.predict(x, verbose=0), atol=1e-6)
    np.testing.assert_array_equal(unzipped.get_weights()[0], model.get_weights()[0])
    unzipped.load_weights(os.path.join(context.folder, "of_parts.weights.json"))
    assert not [name for name in os.listdir(context.folder) if name.startswith(".")]
    with context.strategy.scope():
        again = keras.models.load_model(path)
    np.testing.assert_array_equal(again.evaluate(x, y, verbose=0), model.evaluate(x, y, verbose=0))
    again.fit(x, y, batch_size=20, verbose=0)
    again.load_weights(os.path.join(context.folder, "saved.weights.h5"))
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    alone = keras.models.load_model(path)
    np.testing.assert_allclose(alone.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    if context.index == 0:
        # The chief alone may save, too.
        model.save(os.path.join(context.folder, "chief.keras"))
        model.export(os.path.join(context.folder, "of_chief"), verbose=False)
    return weights_of(model)


@behaviour
def backup_and_restore(context):
    """Interrupted on all workers and started again, it ends as if nothing had happened."""
    x, y = digits_like()

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise Interrupted

    def train(*callbacks):
        keras.utils.set_random_seed(3)
        model = classifier(
            context, dense(16, activation="relu"), lambda: keras.layers.Dropout(0.3), dense(4)
        )
        model.fit(
            x, y, batch_size=20, epochs=4, verbose=0, shuffle=False, callbacks=list(callbacks)
        )
        return model

    # Not a shared disk: only the chief finds something to restore.
    folder = os.path.join(context.folder, f"backup{context.index}")
    try:
        train(keras.callbacks.BackupAndRestore(folder), Interrupt())
    except Interrupted:
        pass
    resumed = train(keras.callbacks.BackupAndRestore(folder))
    whole = train()
    return weights_of(resumed) | {f"whole/{i}": w for i, w in enumerate(whole.get_weights())}


@behaviour
def one_worker_stops(context):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and context.index == 1:
                self.model.stop_training = True

    history = classifier(context, dense(4)).fit(
        *digits_like(), epochs=10, verbose=0, callbacks=[Stop()]
    )
    return {"epochs": np.asarray(len(history.history["loss"]))}


@behaviour
def two_optimizers(context):
    """A generator and a discriminator in one train_step, as in Keras's GAN examples."""

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = keras.layers.Dense(4), keras.layers.Dense(1)
            self.tracker = keras.metrics.Mean(name="tracked")

        def compile(self, a_optimizer, b_optimizer, loss_fn):
            super().compile()
            self.a_optimizer, self.b_optimizer, self.loss_fn = a_optimizer, b_optimizer, loss_fn

        def call(self, x):
            return self.b(self.a(x))

        def train_step(self, data):
            x, y = data
            for layer, optimizer in ((self.a, self.a_optimizer), (self.b, self.b_optimizer)):
                with tf.GradientTape() as tape:
                    loss = self.loss_fn(y, self(x))
                weights = layer.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.tracker.update_state(loss)
            return {"tracked": self.tracker.result()}

    with context.strategy.scope():
        model = Pair()
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.optimizers.Adam(0.01),
            keras.losses.MeanSquaredError(),
        )
    x, y = digits_like()
    history = model.fit(x, y.astype("float32")[:, None], batch_size=20, epochs=3, verbose=0)
    assert history.history["tracked"][-1] < history.history["tracked"][0]
    return weights_of(model)


@behaviour
def own_loop(context):
    """TensorFlow's custom training loop with Keras layers, metrics and optimizer."""
    x, y = digits_like()
    strategy = context.strategy
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.Mean()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    )

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

    for batch in data:
        train(batch)
    return weights_of(model) | {
        "metric": np.asarray(metric.result()),
        "count": np.asarray(metric.count),
    }


def refusal(kind, part, function):
    try:
        function()
    except kind as error:
        assert part in str(error), error
        assert "Received: " in str(error), error
        return
    raise AssertionError(f"not refused: {part}")


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


@behaviour
def optimizers_of_a_step(context):
    """That of a teacher, which is made in one process and steps no more, may be outside."""
    x, y = digits_like()
    with psp.single_process():
        outside = keras.optimizers.SGD(name="critic")
        teacher = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        teacher.compile("sgd", "mse")
        teacher.fit(x, keras.utils.to_categorical(y, 4), verbose=0)
    with context.strategy.scope():
        model = Critic(outside)
        model.compile("sgd", "mse")
    message = "optimizer 'critic' was made outside the strategy's scope"
    refusal(ValueError, message, lambda: model.fit(x, y, verbose=0))
    with context.strategy.scope():
        student = Critic(keras.optimizers.SGD(), teacher)
        student.compile("sgd", "mse")
    student.fit(x, y, batch_size=32, verbose=0)
    return weights_of(student)


@behaviour
def refusals(context):
    scope = context.strategy.scope
    with scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    outside = keras.optimizers.SGD()
    refusal(ValueError, "outside the strategy's scope", lambda: model.compile(outside, "mse"))
    metric = keras.metrics.Mean(name="stray")
    refusal(ValueError, "stray", lambda: model.compile("sgd", "mse", metrics=[metric]))
    x, y = digits_like()
    local = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    with psp.single_process():
        local.compile("sgd", "mse")
    refusal(ValueError, "built outside the strategy's scope", lambda: local.fit(x, y))
    layer = keras.layers.Dense(4)
    layer.build((None, 8))
    with scope():
        mixed = keras.Sequential([keras.Input((8,)), layer])
        mixed.compile("sgd", "mse")
    refusal(ValueError, "kernel", lambda: mixed.fit(x, y))
    refusal(ValueError, "bucket_bytes", lambda: psp.MultiWorkerMirroredStrategy(bucket_bytes=0))
    return {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--service")
    options = parser.parse_args()
    strategy = psp.MultiWorkerMirroredStrategy(startup_timeout=60)
    for name in options.only.split(",") if options.only else BEHAVIOURS:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        results = BEHAVIOURS[name](Context(strategy, options.out, options.service))
        path = os.path.join(options.out, f"{name}.{strategy.task.name}.npz")
        np.savez(path + ".tmp.npz", **results)
        os.replace(path + ".tmp.npz", path)
        print(f"done {name}", flush=True)


if __name__ == "__main__":
    main()
