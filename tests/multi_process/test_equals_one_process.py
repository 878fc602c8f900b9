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
from tests.selection import cases
from tests.support.results import assert_close, load

# The first test of a kind runs the selected cases of it, beside other files on the same cores.
pytestmark = pytest.mark.timeout(1500)

SOURCE = pathlib.Path(__file__).with_name("fit_cases.py")
CASES = re.findall(r"^@case\ndef (\w+)\(", SOURCE.read_text(), re.MULTILINE)
ONLY_ASYNCHRONOUS = re.findall(
    r"^@asynchronous_case\ndef (\w+)\(", SOURCE.read_text(), re.MULTILINE
)
# What several processes or devices do differently from one another shows in these.
CORE = [
    "last_batch_of_one_row",
    "gradient_accumulation_in_loop",
    "synchronised_batch_normalisation",
    "convolutions_of_single_rows",
    "mixed_precision_skips_overflow",
    "own_loss_as_vector",
    "evaluate_and_predict",
    "on_batch",
    "run_eagerly",
]
# What three workers show and two do not.
THREE = ["last_batch_of_one_row", "evaluate_and_predict", "maps_of_own_rows"]
# Two workers with two devices each: what neither two workers nor two devices show.
FOUR_REPLICAS = ["last_batch_of_one_row", "evaluate_and_predict"]
# Through compressors that lose nothing.
LOSSLESS = [
    *("last_batch_of_one_row", "steps_per_execution", "embeddings_of_several_widths"),
    "run_eagerly",
]
# Under parameter servers, a batch's logs are those of the last step that has come back.
NOT_ASYNCHRONOUS = (
    *("logs_of_every_batch", "run_eagerly"),
    *("losses_in_metrics_eagerly", "logs_of_metrics_eagerly", "float8"),
    "in_batch_negatives",
)
# For one worker, which has whole batches, the same as others that are run: a loss is what it is.
MUCH_THE_SAME = [
    *("dataset_of_named_tuples_repeated", "bfloat16", "class_weight_and_validation_split"),
    *("mean_with_sample_weight", "own_loss_as_vector", "own_loss_with_an_empty_replica"),
    *("metric_and_loss_functions_of_whole_batches", "convolutions_of_single_rows"),
    # Among what `callbacks_job.py` does with two.
    "early_stopping_and_plateau",
    # The chief reads the data, as one process does.
    *("maps_of_own_rows", "on_batch_and_predict_of_ragged_and_sparse_rows"),
    *("fit_of_ragged_and_sparse_rows", "perplexity_of_keras_hub", "positions_of_tokens"),
]
# Of these, variables in shards or the steps of two workers have all that whole ones have.
SHARDED_OR_SYNCHRONOUS = [
    *("global_clipnorm", "adamw_with_schedule_and_average", "embeddings_of_several_widths"),
    *("moving_average_after_skipped_steps", "masked_sequence_loss", "several_steps_in_a_loop"),
    *("mixed_precision_skips_overflow", "regularisers_and_constraint"),
]
ASYNCHRONOUS = [
    case
    for case in CASES
    if case not in (*NOT_ASYNCHRONOUS, *MUCH_THE_SAME, *SHARDED_OR_SYNCHRONOUS)
]
ASYNCHRONOUS += ONLY_ASYNCHRONOUS
SHARDED = [
    "global_clipnorm",
    "adamw_with_schedule_and_average",
    "moving_average_after_skipped_steps",
    "several_steps_in_a_loop",
    "embeddings_of_several_widths",
    "masked_sequence_loss",
    "mixed_precision_skips_overflow",
]
# What is particular to two synchronous workers of parameter servers.
SYNCHRONOUS = [
    "steps_per_execution",
    "regularisers_and_constraint",
    "convolutions_of_single_rows",
    *("embeddings_of_several_widths", "positions_of_tokens"),
    "mixed_precision_skips_overflow",
    "own_loss_with_an_empty_replica",
    *("losses_in_metrics", "logs_of_metrics", "perplexity_of_keras_hub"),
    *("step_of_its_own_without_call", "grain_dataset", "fit_of_ragged_and_sparse_rows"),
]
SYNCHRONOUS_SHARDED = [
    *("adamw_with_schedule_and_average", "gradient_accumulation_in_loop", "much_at_once"),
    "positions_of_tokens",
]
# What is particular to stages on two devices; `tests/pipeline` has more.
PIPELINE = [
    *("last_batch_of_one_row", "dataset_of_unknown_length", "on_batch", "logs_of_every_batch"),
    *("moving_average_after_skipped_steps", "much_at_once", "evaluate_and_predict"),
    *("grain_dataset", "positions_of_tokens"),
]
# Two pipelines on four devices: what one does here as well is run here alone.
PIPELINES = [
    *("several_inputs_and_outputs", "gradient_penalty", "gradient_accumulation_in_loop"),
    *("mixed_precision_skips_overflow", "positions_of_tokens"),
]
# Float tolerance: sums over replicas are taken in another order than sums over a batch.
TOLERANCE = dict.fromkeys(CASES + ONLY_ASYNCHRONOUS, 2e-5) | {
    **dict.fromkeys(["losses_in_metrics", "losses_in_metrics_eagerly"], 2e-6),
    **dict.fromkeys(["perplexity_of_keras_hub", "fit_of_ragged_and_sparse_rows"], 2e-6),
    **dict.fromkeys(["logs_of_metrics", "logs_of_metrics_eagerly"], 2e-6),
    # Numbers at the border of two of float8 are rounded to either.
    "float8": 1e-4,
    "bfloat16": 2e-2,
    "mixed_precision_skips_overflow": 2e-3,
    "maps_of_own_rows": 1e-6,
    # Its variance is E[x^2] - E[x]^2, which magnifies the difference.
    "synchronised_batch_normalisation": 1e-4,
}
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def test_the_core_is_part_of_the_cases():
    assert len(CASES) > 30
    assert set(CORE) <= set(CASES)


# What each process runs, one kind of strategy after the other: starting one takes as long as three
# cases do.
PROCESSES = [
    {
        "reference": re.findall(
            r"^@(?:asynchronous_)?case\ndef (\w+)\(", SOURCE.read_text(), re.MULTILINE
        ),
        "devices": CORE,
    },
    {"pipeline": PIPELINE},
    {"pipelines": PIPELINES},
    {"async": ASYNCHRONOUS, "async_sharded": SHARDED},
    {"sync": SYNCHRONOUS, "sync_sharded": SYNCHRONOUS_SHARDED},
]


def words(kinds):
    return [f"{kind}={','.join(names)}" for kind, names in kinds.items() if names]


def one_process(folder, kinds):
    done = subprocess.run(
        [sys.executable, str(SOURCE), str(folder), *words(kinds)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return {"worker-0": done.stdout, "reference": done.stdout}


def cluster(folder, workers, kinds):
    args = [folder, *words(kinds)]
    return run_in_processes(SOURCE, workers=workers, timeout=600, env=ENVIRONMENT, args=args).logs


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    """By kind, the folder and the logs of runs in one process, two of them at a time."""
    wanted = {
        kind: cases(request, "test_one_process", kind=kind) for kinds in PROCESSES for kind in kinds
    }
    # In its own order, whatever that of the tests.
    compared = cases(request)
    wanted["reference"] = [case for case in PROCESSES[0]["reference"] if case in compared]
    folder = tmp_path_factory.mktemp("alone")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = {}
        for kinds in PROCESSES:
            kinds = {kind: wanted[kind] for kind in kinds if wanted[kind]}
            if kinds:
                run = pool.submit(one_process, folder, kinds)
                runs |= {kind: (folder / kind, run) for kind in kinds}
        # All of them before anything else starts, so that they share the cores with nobody.
        concurrent.futures.wait([run for _, run in runs.values()])
    return {kind: (own, run.result) for kind, (own, run) in runs.items()}


@pytest.fixture(scope="module")
def two_workers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_workers")
    names = cases(request, "test_two_workers", "test_accumulated_overflow_halves_the_scale_once")
    lossless = cases(request, "test_two_workers_that_compress_without_loss")
    return folder, cluster(folder, 2, {"workers": names, "lossless": lossless})


@pytest.fixture(scope="module")
def three_workers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three_workers")
    names = cases(request, "test_three_workers")
    return folder / "workers", cluster(folder, 3, {"workers": names})


@pytest.fixture(scope="module")
def two_by_two(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_by_two")
    names = cases(request, "test_two_workers_with_two_devices_each")
    return folder / "devices", cluster(folder, 2, {"devices": names})


def compare(case, alone, folder, logs):
    own, run = alone["reference"]
    expected = load(own / f"{case}.reference.npz", run()["reference"])
    results = [
        load(folder / f"{case}.{name}.npz", log)
        for name, log in logs.items()
        if name.startswith("worker")
    ]
    for other in results[1:]:
        assert set(other) == set(results[0])
        for key, value in results[0].items():
            np.testing.assert_array_equal(value, other[key], err_msg=f"workers differ in {key}")
    assert_close(results[0], expected, TOLERANCE[case])


@pytest.mark.parametrize("case", CASES)
def test_two_workers(case, alone, two_workers):
    folder, logs = two_workers
    assert len(logs) == 2
    compare(case, alone, folder / "workers", logs)


@pytest.mark.parametrize("case", LOSSLESS)
def test_two_workers_that_compress_without_loss(case, alone, two_workers):
    folder, logs = two_workers
    compare(case, alone, folder / "lossless", logs)


@pytest.mark.parametrize("case", THREE)
def test_three_workers(case, alone, three_workers):
    folder, logs = three_workers
    assert len(logs) == 3
    compare(case, alone, folder, logs)


@pytest.mark.parametrize("case", FOUR_REPLICAS)
def test_two_workers_with_two_devices_each(case, alone, two_by_two):
    compare(case, alone, *two_by_two)


# Two devices, as replicas or as stages; four, as stages of two pipelines; one asynchronous worker
# and two parameter servers; two synchronous workers.
@pytest.mark.parametrize(
    "kind, case",
    [
        (kind, case)
        for kinds in PROCESSES
        for kind, names in kinds.items()
        for case in names
        if kind != "reference"
    ],
)
def test_one_process(kind, case, alone):
    folder, run = alone[kind]
    compare(case, alone, folder, {"worker-0": run()["worker-0"]})


@pytest.mark.cases("mixed_precision_skips_overflow")
def test_accumulated_overflow_halves_the_scale_once(two_workers):
    folder, logs = two_workers
    path = folder / "workers" / "mixed_precision_skips_overflow.worker-0.npz"
    results = load(path, logs["worker-0"])
    assert results["scale"] == 2.0**7
    assert results["iterations"] == 3
