"""Ids of any number, files, compressed rows and what is counted of them, in running jobs."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.cluster.testing import run_in_processes
from tests.hybrid.reference import ENVIRONMENT, running_reference
from tests.hybrid.training_job import BATCH, DIM, data
from tests.hybrid.usage_job import EPOCHS, from_files, state_of, write_files

pytestmark = pytest.mark.processes

JOB = pathlib.Path(__file__).with_name("usage_job.py")
WORKERS = "worker-0", "worker-1"
# Words of float32 for a row of eight numbers; that of int8 has its scale with it.
WORDS = {None: 8, "bf16": 4, "int8": 3}


def run(folder, cases, *options):
    args = [folder, cases, *options]
    # A proxy that nobody reaches: tasks do not go through it.
    env = ENVIRONMENT | {"http_proxy": "http://127.0.0.1:9"}
    run_in_processes(JOB, workers=2, ps=2, timeout=560, env=env, args=args)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Where all have left what the cases come to, and what the file of one process holds."""
    folder = tmp_path_factory.mktemp("usage")
    states = write_files(folder)
    with running_reference(JOB, folder, "plain,several,uneven", seconds=60):
        run(folder, "plain,several,uneven,files")
    return folder, states


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """Where a job with compressed rows has left the same, and how it compresses them."""
    folder = tmp_path_factory.mktemp("compressed")
    # `test_rows.py` has what either makes of rows.
    push, pull = "bf16", "int8"
    run(folder, "plain", f"push={push}", f"pull={pull}")
    return folder, push, pull


def assert_near(found, expected):
    assert sorted(found) == sorted(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("worker", WORKERS)
def test_ragged_many_hot_and_repeated_ids_equal_one_process(job, worker):
    folder, _ = job
    found = np.load(folder / f"several-{worker}.npz")
    assert_near(found, np.load(folder / "several-reference.npz"))


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_without_rows_changes_and_counts_nothing(job, worker):
    folder, _ = job
    found = dict(np.load(folder / f"uneven-{worker}.npz"))
    expected = 4 * DIM * rows_of(worker, 2 * BATCH + 1)
    for direction in ("gradient", "pull"):
        assert found.pop(f"{direction} of images/embeddings") == expected
    found = {k: found[k] for k in found if not k.startswith(("gradient of ", "pull of "))}
    assert_near(found, np.load(folder / "uneven-reference.npz"))


def part(state, prefix):
    """What has a prefix, without it."""
    return {k.removeprefix(prefix): state[k] for k in state if k.startswith(prefix)}


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("how", ["weights", "checkpoint", "model"])
def test_a_job_loads_what_one_process_has_written(job, how, worker):
    folder, (before, _) = job
    assert_near(part(np.load(folder / f"files-{worker}.npz"), f"{how} "), before)


def test_training_goes_on_as_in_the_process_that_has_written(job):
    folder, (_, after) = job
    for worker in WORKERS:
        assert_near(part(np.load(folder / f"files-{worker}.npz"), "trained "), after)


@pytest.mark.parametrize("how", ["weights", "checkpoint", "model"])
def test_one_process_loads_what_a_job_has_written(job, how):
    folder, _ = job
    if how == "model":
        model = keras.models.load_model(folder / "job.keras")
    else:
        model = from_files(keras.layers.Embedding)
        if how == "weights":
            model.load_weights(folder / "job.weights.h5")
        else:
            tf.train.Checkpoint(model=model).read(f"{folder}/job").assert_consumed()
    found = state_of(model, data()[0])
    assert_near(found, part(np.load(folder / "files-worker-0.npz"), "trained "))


def plain(folder, worker):
    return np.load(folder / f"plain-{worker}.npz")


@pytest.mark.extended
def test_compressed_rows_train_nearly_alike(job, compressed):
    exact, first, second = (
        plain(job[0], "reference"),
        *(plain(compressed[0], worker) for worker in WORKERS),
    )
    trained = [name for name in exact if name.startswith("weight_")]
    assert len(trained) == 4
    for name in trained:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        learned = np.abs(exact[name] - exact[name.replace("weight", "initial")]).max()
        # Other jobs without compression are nearer than that. The gradients of the table `other`
        # do not depend on rows that are read: it shows what is lost when they are sent.
        assert 1e-5 < np.abs(first[name] - exact[name]).max() < 0.01 * learned, name


def test_rows_are_read_as_they_are(job):
    for worker in WORKERS:
        found = plain(job[0], worker)
        np.testing.assert_array_equal(found["read"], found["other"][data()[0]])


@pytest.mark.extended
def test_rows_that_are_read_are_compressed(compressed):
    folder, *_ = compressed
    for worker in WORKERS:
        found = plain(folder, worker)
        rows = found["other"][data()[0]]
        largest = np.abs(rows).max(axis=-1, keepdims=True)
        # The distance between two numbers that can be told apart.
        limit = largest / 127
        lost = np.abs(found["read"] - rows)
        assert lost.max() > 1e-5 and np.all(lost <= limit * 1.001)


def rows_of(worker, examples=None):
    """Rows that a worker looks up in training with some examples, by default all."""
    x = data()[0][:examples]
    parts = (np.array_split(x[i : i + BATCH], 2) for i in range(0, len(x), BATCH))
    shares = (part[WORKERS.index(worker)] for part in parts)
    return EPOCHS * sum(len(np.unique(share)) for share in shares)


def assert_counted(folder, worker, push, pull):
    found, rows, sent = plain(folder, worker), rows_of(worker), 0
    for direction, compression in (("gradient", push), ("pull", pull)):
        words = WORDS[compression]
        # The row's number goes with it.
        expected = [4 * rows * n for n in (DIM, words, words + 1)]
        for table in ("table", "other"):
            assert found[f"{direction} of {table}/embeddings"].tolist() == expected
            sent += expected[2]
    # The monitor's bytes of a step, times steps, are all that was sent: what is dense, too.
    assert len(data()[0]) // BATCH * sum(found["monitored"]) == found["total"] > sent


@pytest.mark.parametrize("worker", WORKERS)
def test_rows_are_counted_and_monitored(job, worker):
    assert_counted(job[0], worker, None, None)


@pytest.mark.extended
@pytest.mark.parametrize("worker", WORKERS)
def test_compressed_rows_are_counted_as_what_is_sent(compressed, worker):
    assert_counted(compressed[0], worker, *compressed[1:])
