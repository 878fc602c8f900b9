"""Data is seen once, files are written once, workers stop and resume together."""

import contextlib
import csv
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests.selection import cases
from tests.support.results import load

SOURCE = pathlib.Path(__file__).with_name("behaviours.py")
BEHAVIOURS = re.findall(r"^@behaviour\ndef (\w+)\(", SOURCE.read_text(), re.MULTILINE)
WORKERS = 2


class Run:
    def __init__(self, folder, logs):
        self.folder, self.logs = folder, logs

    def __getitem__(self, name):
        """The results of one behaviour, by worker."""
        workers = [f"worker-{i}" for i in range(WORKERS)]
        return [load(self.folder / f"{name}.{w}.npz", self.logs[w]) for w in workers]


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    names = ",".join(cases(request, argument="name"))
    folder = tmp_path_factory.mktemp("behaviours")
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    with data_service({**os.environ, **env}, folder / "service.log") as address:
        result = run_in_processes(
            SOURCE,
            workers=WORKERS,
            timeout=560,
            env=env,
            args=["--out", folder, "--only", names, "--service", address],
        )
    return Run(folder, result.logs)


@contextlib.contextmanager
def data_service(env, log):
    """A dispatcher and two workers of the tf.data service: its address."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(SOURCE.with_name("data_service.py"))],
            env=env,
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


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_workers_end_with_the_same_weights(name, run):
    first, *others = run[name]
    for other in others:
        for key in first:
            if key.startswith("weights/"):
                np.testing.assert_array_equal(first[key], other[key], err_msg=key)


def epochs(results):
    """For each epoch, the ids that each worker saw."""
    return [[worker[key] for worker in results] for key in sorted(results[0])]


def assert_each_id_once(results, ids):
    for seen in epochs(results):
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), ids)
        assert min(len(part) for part in seen) > 0.6 * len(ids) / WORKERS


@pytest.mark.parametrize(
    "name, ids",
    [
        ("shuffled_arrays", range(103)),
        ("arrays_shuffled_by_batch", range(103)),
        ("unseeded_dataset", range(103)),
        ("shuffled_py_dataset", range(103)),
        ("files_shared_out", [*range(20), *range(20, 39), *range(40, 58)]),
    ],
)
def test_each_element_is_seen_once_an_epoch(name, ids, run):
    assert_each_id_once(run[name], np.asarray(ids))


@pytest.mark.cases("unseeded_dataset_with_cache_and_repeat")
def test_repeated_dataset_is_seen_whole(run):
    seen = np.concatenate(
        [ids for epoch in epochs(run["unseeded_dataset_with_cache_and_repeat"]) for ids in epoch]
    )
    np.testing.assert_array_equal(np.bincount(seen), np.full(100, 2))


@pytest.mark.parametrize("name", ["shuffled_arrays", "unseeded_dataset", "shuffled_py_dataset"])
def test_each_epoch_has_an_order_of_its_own(name, run):
    first, second = epochs(run[name])
    assert not np.array_equal(first[0], np.sort(first[0]))
    assert not np.array_equal(first[0], second[0])


@pytest.mark.cases("arrays_shuffled_by_batch")
def test_batches_are_shuffled_within(run):
    for seen in epochs(run["arrays_shuffled_by_batch"]):
        for first in range(0, 100, 10):
            batch = np.concatenate([ids[first // 2 : first // 2 + 5] for ids in seen])
            np.testing.assert_array_equal(np.sort(batch), np.arange(first, first + 10))


@pytest.mark.parametrize("name", ["own_shares_of_unequal_length", "arrays_of_unequal_length"])
def test_workers_with_less_data_wait_for_the_others(name, run):
    for worker, rows in enumerate((40, 75)):
        for ids in epochs(run[name]):
            expected = np.arange(1000 * worker, 1000 * worker + rows)
            np.testing.assert_array_equal(np.sort(ids[worker]), expected)


@pytest.mark.cases("own_shares_of_changing_length")
def test_own_shares_may_have_another_length_in_each_epoch(run):
    for worker, lengths in enumerate(((40, 75, 9), (20, 5, 48))):
        for epoch, ids in enumerate(epochs(run["own_shares_of_changing_length"])):
            first = 1000 * (10 * worker + epoch)
            np.testing.assert_array_equal(np.sort(ids[worker]), first + np.arange(lengths[epoch]))


@pytest.mark.parametrize("name", ["dataset_of_changing_length", "changing_length_in_several_steps"])
def test_a_dataset_may_have_another_length_in_each_epoch(name, run):
    for epoch, (ids, rows) in enumerate(zip(epochs(run[name]), (23, 103, 7), strict=True)):
        np.testing.assert_array_equal(np.sort(np.concatenate(ids)), 1000 * epoch + np.arange(rows))


@pytest.mark.cases("data_service")
def test_each_row_of_the_data_service_is_seen_once_an_epoch(run):
    seen = epochs(run["data_service"])
    assert len(seen) == 4
    for ids in seen:
        np.testing.assert_array_equal(np.sort(np.concatenate(ids)), np.arange(640))
    assert "share (tf.data service, job 'train')" in run.logs["worker-0"]


@pytest.mark.cases("data_service_in_functions")
def test_the_data_service_is_found_in_functions(run):
    (ids,) = epochs(run["data_service_in_functions"])
    np.testing.assert_array_equal(np.sort(np.concatenate(ids)), np.arange(203))


@pytest.mark.cases("data_service_with_jobs_of_its_own")
def test_jobs_of_each_worker_are_its_own_share(run):
    (ids,) = epochs(run["data_service_with_jobs_of_its_own"])
    for seen in ids:
        np.testing.assert_array_equal(np.sort(seen), np.arange(203))


@pytest.mark.cases("shuffled_arrays", "files_shared_out", "arrays_of_unequal_length")
def test_one_log_line_says_how_data_are_shared_out(run):
    log = run.logs["worker-0"]
    assert "103 rows in batches of 10, each split by rows, shuffled alike" in log
    assert "the workers' data differ (worker-0: rows=40" in log
    assert "AutoShardPolicy.FILE" in log
    assert "data over" not in run.logs["worker-1"]


@pytest.mark.cases("maps_of_own_rows")
@pytest.mark.parametrize("pipeline", ["shuffled", "generated", "trusted", "unknown"])
def test_each_worker_maps_its_own_rows(pipeline, run):
    workers = run["maps_of_own_rows"]
    seen = [set(worker[f"{pipeline}/seen"]) for worker in workers]
    mapped = [set(worker[f"{pipeline}/mapped"]) for worker in workers]
    assert set.union(*seen) == set(range(103))
    # Of the last batch, a worker that has as many rows of others maps all three.
    assert [len(ids) for ids in seen] == [52, 51]
    if pipeline == "unknown":
        # Python code that may keep what it has seen.
        assert mapped == [set(range(103))] * 2
    else:
        assert [len(ids) for ids in mapped] == [53, 53]
        assert all(ids > own for ids, own in zip(mapped, seen, strict=True))


@pytest.mark.cases("maps_of_own_rows")
def test_one_log_line_says_who_maps_which_rows(run):
    assert run["maps_of_own_rows"]
    log = run.logs["worker-0"]
    assert "split by rows; each worker maps only its own rows (1 map before the batch)" in log
    assert "every worker runs the whole pipeline, as a map runs Python code (PyFunc)" in log


@pytest.mark.cases("models_outside_the_scope")
def test_a_model_of_one_process_is_its_own(run):
    first, second = (worker["losses"] for worker in run["models_outside_the_scope"])
    assert first[0] != second[0]
    for before, after in (first, second):
        assert after < before


@pytest.mark.cases("dropout_draws_a_mask_for_each_replica")
def test_dropout_masks_differ(run):
    a, b = (worker["mask"] for worker in run["dropout_draws_a_mask_for_each_replica"])
    assert a.shape == b.shape == (4, 64)
    assert not np.array_equal(a, b)


@pytest.mark.cases("noise_is_reproducible")
def test_noise_is_reproducible_from_the_seed(run):
    results = run["noise_is_reproducible"][0]
    for key in [k for k in results if k.startswith("0/")]:
        np.testing.assert_array_equal(results[key], results[f"1/{key[2:]}"])


@pytest.mark.cases("batch_normalisation_averages")
def test_moving_averages_are_finite(run):
    for array in run["batch_normalisation_averages"][0].values():
        assert np.isfinite(array).all()


@pytest.mark.cases("writing_callbacks")
def test_callbacks_write_once_from_the_chief(run):
    assert run["writing_callbacks"]
    folder = run.folder / "written"
    assert sorted(p.name for p in folder.glob("*.keras")) == ["1.keras", "2.keras", "3.keras"]
    assert (folder / "best.weights.h5").exists()
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    with open(folder / "log.csv") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert len(list(folder.glob("tb/train/*tfevents*"))) == 1
    assert (folder / "backup" / "latest.weights.h5").exists()
    assert len(list((run.folder / "disk0").rglob("*"))) > 3
    assert [p for p in (run.folder / "disk1").rglob("*") if p.is_file()] == []


@pytest.mark.cases("backup_and_restore")
def test_resumed_training_equals_uninterrupted(run):
    results = run["backup_and_restore"][0]
    for key in [k for k in results if k.startswith("weights/")]:
        whole = results[key.replace("weights/", "whole/")]
        np.testing.assert_array_equal(results[key], whole)


@pytest.mark.cases("backup_and_restore")
def test_backup_is_gone_after_training(run):
    assert run["backup_and_restore"]
    assert not os.path.exists(run.folder / "backup0")


@pytest.mark.cases("one_worker_stops")
def test_a_stop_on_one_worker_stops_all(run):
    assert [int(worker["epochs"]) for worker in run["one_worker_stops"]] == [3, 3]


@pytest.mark.cases("own_loop")
def test_own_loop_counts_all_rows(run):
    for worker in run["own_loop"]:
        assert worker["count"] == 96
