"""Data are shared out among workers: each row is seen once an epoch, and one line says how."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import jobs
from tests.support.cluster import makes_scope, run, strategy_of
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

SERVICE = pathlib.Path(__file__).with_name("data_service.py")
POLICY = tf.data.experimental.AutoShardPolicy


class Watching(keras.Model):
    """A linear model that notes the ids (its first feature) that each step of it sees."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x[:, 1:])

    def train_step(self, data):
        from keras_psplus.core.batch import replica_step

        def note(ids):
            self.seen.append(ids.astype("int64"))
            return np.int32(0)

        # Not the row of a worker that has run out of data.
        ids = replica_step.current_step().rows_if_any(data[0][:, 0])
        noted = tf.numpy_function(note, [ids], tf.int32)
        with tf.control_dependencies([noted]):
            return super().train_step(data)


def numbered(rows, first=0):
    x = np.ones((rows, 3), "float32")
    x[:, 0] = np.arange(first, first + rows)
    return x, np.ones((rows, 1), "float32")


def watch(*args, epochs=2, compile_options=None, **kwargs):
    """Fits and returns the ids seen in each epoch by this worker."""
    model = Watching()
    model.compile("sgd", "mse", **(compile_options or {}))
    epoch_starts = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epoch_starts.append(len(model.seen))
    )
    model.fit(*args, epochs=epochs, verbose=0, callbacks=[note], **kwargs)
    ends = epoch_starts[1:] + [len(model.seen)]
    return {
        f"epoch{i}": np.concatenate([np.zeros(0, "int64"), *model.seen[a:b]])
        for i, (a, b) in enumerate(zip(epoch_starts, ends, strict=True))
    }


def worker():
    return tf.distribute.get_strategy().task.task_index


def with_policy(data, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def epochs(results):
    """For each epoch, the ids that each worker saw."""
    first, *_ = workers = list(results.values())
    return [[worker[key] for worker in workers] for key in sorted(first)]


def assert_each_id_once(seen, ids):
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), ids)
    assert min(len(part) for part in seen) > 0.6 * len(ids) / len(seen)


def shuffled_arrays():
    return watch(*numbered(103), batch_size=10)


def arrays_shuffled_by_batch():
    return watch(*numbered(103), batch_size=10, shuffle="batch")


def unseeded_dataset():
    tf.random.set_seed(None)  # or shuffle() would draw its seed from the global one
    return watch(tf.data.Dataset.from_tensor_slices(numbered(103)).shuffle(60).batch(10))


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return numbered(10 if index < 10 else 3, 10 * index)


def shuffled_py_dataset():
    return watch(Numbered(), shuffle=True)


@pytest.mark.parametrize(
    "case", [shuffled_arrays, unseeded_dataset, *extended(shuffled_py_dataset)]
)
def test_each_row_is_seen_once_an_epoch_in_an_order_of_its_own(case):
    results = run("ar2", case, same=False)
    first, second = epochs(results)
    for seen in (first, second):
        assert_each_id_once(seen, range(103))
    assert not np.array_equal(first[0], np.sort(first[0]))
    assert not np.array_equal(first[0], second[0])
    if case is shuffled_arrays:
        line = "103 rows in batches of 10, each split by rows, shuffled alike"
        assert line in results.logs["worker-0"]
        assert "data over" not in results.logs["worker-1"]


@pytest.mark.extended
def test_batches_are_shuffled_within():
    for seen in epochs(run("ar2", arrays_shuffled_by_batch, same=False)):
        assert_each_id_once(seen, range(103))
        for first in range(0, 100, 10):
            batch = np.concatenate([ids[first // 2 : first // 2 + 5] for ids in seen])
            np.testing.assert_array_equal(np.sort(batch), np.arange(first, first + 10))


def files_shared_out(folder):
    folder = pathlib.Path(folder)
    paths = [str(folder / f"{i}.txt") for i in range(3)]
    for i, path in enumerate(paths):
        # Each worker writes the same files, so that none has to wait for another.
        own = pathlib.Path(f"{path}.{worker()}")
        own.write_text("".join(f"{n}\n" for n in range(i * 20, i * 20 + 20 - i)))
        os.replace(own, path)

    def parse(line):
        x = tf.stack([tf.strings.to_number(line), 1.0, 1.0])
        return x, tf.ones([1])

    data = tf.data.Dataset.from_tensor_slices(paths).interleave(tf.data.TextLineDataset)
    return watch(with_policy(data.map(parse).batch(10), POLICY.FILE))


def test_each_line_of_files_that_are_shared_out_is_seen_once(tmp_path):
    results = run("ar2", files_shared_out, same=False, folder=str(tmp_path))
    for seen in epochs(results):
        assert_each_id_once(seen, [*range(20), *range(20, 39), *range(40, 58)])
    assert "AutoShardPolicy.FILE" in results.logs["worker-0"]


def own_shares_of_unequal_length():
    rows = (40, 75)[worker()]
    data = tf.data.Dataset.from_tensor_slices(numbered(rows, 1000 * worker()))
    return watch(with_policy(data.batch(10), POLICY.OFF))


def arrays_of_unequal_length():
    rows = (40, 75)[worker()]
    return watch(*numbered(rows, 1000 * worker()), batch_size=10, shuffle=False)


@pytest.mark.parametrize(
    "case", [own_shares_of_unequal_length, *extended(arrays_of_unequal_length)]
)
def test_workers_with_less_data_wait_for_the_others(case):
    results = run("ar2", case, same=False)
    for seen in epochs(results):
        for ids, first, rows in zip(seen, (0, 1000), (40, 75), strict=True):
            np.testing.assert_array_equal(np.sort(ids), np.arange(first, first + rows))
    if case is arrays_of_unequal_length:
        assert "the workers' data differ (worker-0: rows=40" in results.logs["worker-0"]


LENGTHS = ((40, 75, 9), (20, 5, 48))


def changing_lengths(rows_by_epoch):
    """A dataset that has another number of rows each time it is read."""
    epochs = iter(rows_by_epoch)

    def rows():
        epoch, rows = next(epochs)
        yield from zip(*numbered(rows, 1000 * epoch), strict=True)

    spec = tf.TensorSpec([3]), tf.TensorSpec([1])
    return tf.data.Dataset.from_generator(rows, output_signature=spec).batch(10)


def own_shares_of_changing_length():
    data = changing_lengths(enumerate(LENGTHS[worker()], 10 * worker()))
    return watch(with_policy(data, POLICY.OFF), epochs=3)


def test_own_shares_may_have_another_length_in_each_epoch():
    found = epochs(run("ar2", own_shares_of_changing_length, same=False))
    for worker, lengths in enumerate(LENGTHS):
        for epoch, (ids, rows) in enumerate(zip(found, lengths, strict=True)):
            first = 1000 * (10 * worker + epoch)
            np.testing.assert_array_equal(np.sort(ids[worker]), first + np.arange(rows))


def dataset_of_changing_length():
    options = {"steps_per_execution": 3}
    return watch(changing_lengths(enumerate((23, 103, 7))), epochs=3, compile_options=options)


@pytest.mark.extended
def test_a_dataset_may_have_another_length_in_each_epoch():
    found = epochs(run("ar2", dataset_of_changing_length, same=False))
    for epoch, (ids, rows) in enumerate(zip(found, (23, 103, 7), strict=True)):
        np.testing.assert_array_equal(np.sort(np.concatenate(ids)), 1000 * epoch + np.arange(rows))


def maps_of_own_rows():
    """By pipeline, the ids that this worker has mapped, beside those that it has seen."""
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

    spec = tf.TensorSpec([3]), tf.TensorSpec([1])
    slices = tf.data.Dataset.from_tensor_slices(numbered(103))
    generated = tf.data.Dataset.from_generator(
        lambda: zip(*numbered(103), strict=True), output_signature=spec
    )
    tf.random.set_seed(None)
    pipelines = {
        "shuffled": noted(slices.shuffle(60), stateful=False).batch(10).prefetch(2),
        "generated": noted(generated, stateful=False).batch(10),
        "trusted": with_policy(noted(slices).batch(10), POLICY.DATA),
        "unknown": noted(slices).batch(10),
    }
    results = {}
    for name, data in pipelines.items():
        mapped.clear()
        seen = watch(data, epochs=1)["epoch0"]
        results |= {f"{name}/mapped": np.unique(mapped), f"{name}/seen": np.unique(seen)}
    return results


def test_each_worker_maps_its_own_rows():
    results = run("ar2", maps_of_own_rows, same=False)
    for pipeline in ("shuffled", "generated", "trusted", "unknown"):
        seen = [set(worker[f"{pipeline}/seen"]) for worker in results.values()]
        mapped = [set(worker[f"{pipeline}/mapped"]) for worker in results.values()]
        assert set.union(*seen) == set(range(103))
        # Of the last batch, a worker that has as many rows of others maps all three.
        assert [len(ids) for ids in seen] == [52, 51]
        if pipeline == "unknown":
            # Python code that may keep what it has seen.
            assert mapped == [set(range(103))] * 2
        else:
            assert [len(ids) for ids in mapped] == [53, 53]
            assert all(ids > own for ids, own in zip(mapped, seen, strict=True))
    log = results.logs["worker-0"]
    assert "split by rows; each worker maps only its own rows (1 map before the batch)" in log
    assert "every worker runs the whole pipeline, as a map runs Python code (PyFunc)" in log


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """The address of a tf.data service: a dispatcher and two workers."""
    log = tmp_path_factory.mktemp("service") / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(SERVICE)],
            env=jobs.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        address = process.stdout.readline().decode().strip()
        assert address.startswith("grpc://"), log.read_text(errors="replace")[-4000:]
        yield address
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def of_service(address, job_name, mode="distributed_epoch", rows=203, **kwargs):
    """A dataset of batches in an order of each reading, from the tf.data service."""
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(numbered(rows)).shuffle(rows).batch(8)
    distribute = tf.data.experimental.service.distribute
    return data.apply(distribute(mode, address, job_name=job_name, **kwargs))


def one_job_for_all(address):
    data = of_service(address, "train")
    return watch(data, epochs=2, validation_data=of_service(address, "validation", rows=50))


@pytest.mark.extended
def test_each_row_of_the_data_service_is_seen_once_an_epoch(service):
    results = run("ar2", one_job_for_all, same=False, address=service)
    for ids in epochs(results):
        np.testing.assert_array_equal(np.sort(np.concatenate(ids)), np.arange(203))
    assert "share (tf.data service, job 'train')" in results.logs["worker-0"]


def refused(message, *args, **kwargs):
    """Fails unless `fit` refuses data by a message."""
    with pytest.raises(ValueError) as error:
        watch(*args, **kwargs)
    assert message in str(error.value) and "Received: " in str(error.value), error.value


def service_refusals(address):
    refused("without a `job_name`", of_service(address, None))
    refused("without a `job_name`", of_service(address, None).repeat(), steps_per_epoch=3)
    refused("from different jobs", of_service(address, f"job {worker()}"))
    refused("'parallel_epochs'", of_service(address, "parallel", "parallel_epochs"))
    turns = {"consumer_index": 0, "num_consumers": 2}
    refused("a `consumer_index` each", of_service(address, "turns", **turns))
    watch(of_service(address, "over"), epochs=1)
    refused("The epoch had no batch", of_service(address, "over"))


def test_jobs_of_the_service_that_give_rows_twice_or_never_are_refused(service):
    run("ar2", service_refusals, address=service)


def batch_sizes_that_differ():
    size = (10, 20)[worker()]
    x, y = numbered(60)
    both = "(worker-0: batch_size=10; worker-1: batch_size=20)"
    refused(both, x, y, batch_size=size)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size).map(lambda x, y: (x, y))
    refused("AutoShardPolicy.OFF", data)
    batches = Numbered()
    batches.batch_size = size
    refused(both, batches)


@pytest.mark.extended
def test_batch_sizes_that_differ_are_refused():
    run("ar2", batch_sizes_that_differ)


def small_images(mine):
    """Ten images of a size that the graph does not know, or some of them, and their labels."""
    x = np.random.default_rng(5).normal(size=(10, 5, 5, 1)).astype("float32")
    y = x.mean((1, 2))
    data = tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(4)

    def of_unknown_size(x, y):
        return tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, None, None, 1]), y

    return x, y, with_policy(data.map(of_unknown_size), POLICY.OFF)


def convolution(synchronized):
    inputs = keras.Input((None, None, 1))
    maps = keras.layers.Conv2D(3, 3, activation="relu")(inputs)
    maps = keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.5)(maps)
    rows = keras.layers.GlobalAveragePooling2D()(maps)
    return keras.Model(inputs, keras.layers.Dense(1)(rows))


def trained_by_hand(model, x, y, steps):
    """Losses of the rows of each step."""
    losses = []
    for rows in steps:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[rows], training=True) - y[rows]))
        weights = model.trainable_variables
        for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            variable.assign_sub(0.1 * gradient)
        losses += [float(loss)] * len(rows)
    return losses


@makes_scope
def convolutions_of_shares_of_unequal_length(scope):
    """One worker has seven rows and one has three: after two of four steps, it has none."""
    strategy = strategy_of(scope)
    is_first = strategy.task.task_index == 0
    x, y, data = small_images(slice(0, 7) if is_first else slice(7, 10))
    with scope():
        model = convolution(synchronized=True)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    # The batches of both together, and one process by hand.
    steps = [0, 1, 7, 8], [2, 3, 9], [4, 5], [6]
    alone = convolution(synchronized=False)
    alone.set_weights(model.get_weights())
    losses = trained_by_hand(alone, x, y, steps * 2)
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
    return model, {}


@pytest.mark.extended
def test_convolutions_of_shares_of_unequal_length():
    run("ar2", convolutions_of_shares_of_unequal_length)
