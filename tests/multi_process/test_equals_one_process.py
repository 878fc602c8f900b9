"""Every way of training equals one process on the same global batches, on all workers alike."""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes

# The first test of a kind runs all cases of it, beside other files on the same cores.
pytestmark = pytest.mark.timeout(1500)

SOURCE = pathlib.Path(__file__).with_name("fit_cases.py")
CASES = re.findall(r"^@case\ndef (\w+)\(", SOURCE.read_text(), re.MULTILINE)
ONLY_ASYNCHRONOUS = re.findall(
    r"^@asynchronous_case\ndef (\w+)\(", SOURCE.read_text(), re.MULTILINE
)
# What several processes or devices do differently from one another shows in these.
CORE = [
    "numpy_short_last_batch",
    "last_batch_of_one_row",
    "dataset_of_unknown_length",
    "global_clipnorm",
    "gradient_accumulation_in_loop",
    "lstm",
    "masked_sequence_loss",
    "synchronised_batch_normalisation",
    "mixed_precision_skips_overflow",
    "own_loss_as_vector",
    "evaluate_and_predict",
    "on_batch",
    "run_eagerly",
]
# What three workers show and two do not.
THREE = [
    *("last_batch_of_one_row", "dataset_of_unknown_length", "synchronised_batch_normalisation"),
    *("masked_sequence_loss", "evaluate_and_predict"),
]
# Two workers with two devices each: what neither two workers nor two devices show.
FOUR_REPLICAS = ["last_batch_of_one_row", "evaluate_and_predict"]
# Through compressors that lose nothing.
LOSSLESS = [
    *("last_batch_of_one_row", "steps_per_execution", "embedding_with_adam", "run_eagerly"),
]
# Under parameter servers, a batch's logs are those of the step that came back last.
NOT_ASYNCHRONOUS = ("logs_of_every_batch", "run_eagerly")
# For one worker, the same as others that are run.
MUCH_THE_SAME = [
    *("numpy_defaults", "even_batches", "dataset", "dataset_drop_remainder", "clipvalue"),
    *("py_dataset_with_threads", "own_loss_as_mean", "convolution", "attention"),
    *("validation_data_and_freq", "dataset_repeated", "sample_weight", "bfloat16"),
    *("own_loss_as_vector", "dataset_of_named_tuples", "predict_with_steps_per_execution"),
]
ASYNCHRONOUS = [case for case in CASES if case not in (*NOT_ASYNCHRONOUS, *MUCH_THE_SAME)]
ASYNCHRONOUS += ONLY_ASYNCHRONOUS
SHARDED = [
    "numpy_short_last_batch",
    "global_clipnorm",
    "adamw_with_schedule",
    "moving_average_after_skipped_steps",
    "several_steps_in_a_loop",
    "embedding_with_adam",
    "masked_sequence_loss",
    "mixed_precision_skips_overflow",
    "evaluate_and_predict",
]
# What is particular to two synchronous workers of parameter servers.
SYNCHRONOUS = [
    "numpy_short_last_batch",
    "steps_per_execution_dataset",
    "gradient_accumulation",
    "regularisers_and_constraint",
    "embeddings_of_several_widths",
    "mixed_precision_skips_overflow",
    "own_loss_with_an_empty_replica",
]
SYNCHRONOUS_SHARDED = ["clipnorm", "gradient_accumulation_in_loop", "much_at_once"]
# Float tolerance: sums over replicas are taken in another order than sums over a batch.
TOLERANCE = dict.fromkeys(CASES + ONLY_ASYNCHRONOUS, 2e-5) | {
    "bfloat16": 2e-2,
    "mixed_precision_skips_overflow": 2e-3,
    # Its variance is E[x^2] - E[x]^2, which magnifies the difference.
    "synchronised_batch_normalisation": 1e-4,
}
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def test_the_core_is_part_of_the_cases():
    assert len(CASES) > 40
    assert set(CORE) <= set(CASES)


def one_process(folder, *args):
    done = subprocess.run(
        [sys.executable, str(SOURCE), "--out", str(folder), *args],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def cluster(folder, workers, *args):
    script_args = ["--out", folder, *args]
    return run_in_processes(
        SOURCE, workers=workers, timeout=600, env=ENVIRONMENT, args=script_args
    ).logs


# Runs that take one process each.
SINGLE = {
    "reference": ["--reference"],
    "two_devices": ["--devices", "2", "--cases", ",".join(CORE)],
    "one_worker_two_ps": ["--ps", "2", "--cases", ",".join(ASYNCHRONOUS)],
    "two_synchronous_workers": ["--ps", "1", "--sync", "--cases", ",".join(SYNCHRONOUS)],
    "two_synchronous_workers_two_shards": [
        *("--ps", "2", "--shards", "2", "--sync", "--cases", ",".join(SYNCHRONOUS_SHARDED))
    ],
    "two_shards": ["--ps", "2", "--shards", "2", "--cases", ",".join(SHARDED)],
}


@pytest.fixture(scope="session")
def single(request, tmp_path_factory):
    """The results of runs in one process, by name: two at a time, as each keeps one core busy."""
    wanted = {name for item in request.session.items for name in item.fixturenames}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = {}
        for name, args in SINGLE.items():
            if name in wanted:
                folder = tmp_path_factory.mktemp(name)
                runs[name] = folder, pool.submit(one_process, folder, *args)
        # All of them before anything else starts, so that they share the cores with nobody.
        concurrent.futures.wait([run for _, run in runs.values()])
    return runs


@pytest.fixture(scope="session")
def reference(single):
    folder, run = single["reference"]
    return folder, run.result()


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_workers")
    return folder, cluster(folder, 2, "--cases", ",".join(CASES))


@pytest.fixture(scope="session")
def lossless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless")
    return folder, cluster(folder, 2, "--lossless", "--cases", ",".join(LOSSLESS))


@pytest.fixture(scope="session")
def three_workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three_workers")
    return folder, cluster(folder, 3, "--cases", ",".join(THREE))


@pytest.fixture(scope="session")
def two_by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_by_two")
    return folder, cluster(folder, 2, "--devices", "2", "--cases", ",".join(FOUR_REPLICAS))


@pytest.fixture(scope="session")
def two_devices(single):
    folder, run = single["two_devices"]
    return folder, {"worker-0": run.result()}


@pytest.fixture(scope="session")
def one_worker_two_ps(single):
    folder, run = single["one_worker_two_ps"]
    return folder, {"worker-0": run.result()}


@pytest.fixture(scope="session")
def two_shards(single):
    folder, run = single["two_shards"]
    return folder, {"worker-0": run.result()}


@pytest.fixture(scope="session")
def two_synchronous_workers(single):
    folder, run = single["two_synchronous_workers"]
    return folder, {"worker-0": run.result()}


@pytest.fixture(scope="session")
def two_synchronous_workers_two_shards(single):
    folder, run = single["two_synchronous_workers_two_shards"]
    return folder, {"worker-0": run.result()}


def compare(case, reference, run, workers):
    folder, logs = run
    expected = load(reference[0] / f"{case}.reference.npz", reference[1])
    results = [load(folder / f"{case}.worker-{i}.npz", logs[f"worker-{i}"]) for i in range(workers)]
    for other in results[1:]:
        assert set(other) == set(results[0])
        for key, value in results[0].items():
            np.testing.assert_array_equal(value, other[key], err_msg=f"workers differ in {key}")
    assert set(results[0]) == set(expected)
    for key, value in expected.items():
        tolerance = TOLERANCE[case]
        np.testing.assert_allclose(
            results[0][key], value, rtol=tolerance, atol=tolerance, err_msg=key
        )


def load(path, log):
    assert path.exists(), f"{path.name} is missing:\n{log[-8000:]}"
    with np.load(path) as results:
        return dict(results)


@pytest.mark.parametrize("case", CASES)
def test_two_workers(case, reference, two_workers):
    compare(case, reference, two_workers, workers=2)


@pytest.mark.parametrize("case", LOSSLESS)
def test_two_workers_that_compress_without_loss(case, reference, lossless):
    compare(case, reference, lossless, workers=2)


@pytest.mark.parametrize("case", THREE)
def test_three_workers(case, reference, three_workers):
    compare(case, reference, three_workers, workers=3)


@pytest.mark.parametrize("case", CORE)
def test_one_process_with_two_devices(case, reference, two_devices):
    compare(case, reference, two_devices, workers=1)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_one_asynchronous_worker(case, reference, one_worker_two_ps):
    compare(case, reference, one_worker_two_ps, workers=1)


@pytest.mark.parametrize("case", SHARDED)
def test_one_asynchronous_worker_with_sharded_variables(case, reference, two_shards):
    compare(case, reference, two_shards, workers=1)


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_two_synchronous_workers(case, reference, two_synchronous_workers):
    compare(case, reference, two_synchronous_workers, workers=1)


@pytest.mark.parametrize("case", SYNCHRONOUS_SHARDED)
def test_two_synchronous_workers_with_sharded_variables(
    case, reference, two_synchronous_workers_two_shards
):
    compare(case, reference, two_synchronous_workers_two_shards, workers=1)


@pytest.mark.parametrize("case", FOUR_REPLICAS)
def test_two_workers_with_two_devices_each(case, reference, two_by_two):
    compare(case, reference, two_by_two, workers=2)


def test_accumulated_overflow_halves_the_scale_once(two_workers):
    folder, logs = two_workers
    results = load(folder / "mixed_precision_skips_overflow.worker-0.npz", logs["worker-0"])
    assert results["scale"] == 2.0**7
    assert results["iterations"] == 3
