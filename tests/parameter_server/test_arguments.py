"""Arguments that have no meaning are refused before anything starts."""

import json
import re

import pytest

import keras_psplus as psp
from keras_psplus import compression, updates
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.parameter_server.context import Mode
from keras_psplus.parameter_server.pulls import Compressors
from keras_psplus.parameter_server.strategy import (
    check_min_workers,
    check_mode,
    check_no_min_workers,
    check_overlap,
)
from tests.support.tables import for_each

# Two workers; in a server, the constructor would not return.
CLUSTER = {
    "cluster": {
        "chief": ["127.0.0.1:1"],
        "worker": ["127.0.0.1:2", "127.0.0.1:3"],
        "ps": ["127.0.0.1:4"],
    },
    "task": {"type": "ps", "index": 0},
}


class OnlyExchange(compression.Compressor):
    def exchange(self, tensor, state, step):
        yield []


UNFIT = ["int9", "topk", 3, OnlyExchange(), {"*": OnlyExchange()}, "factors"]
# The last argument is the one that the error names.
REFUSED = [
    {"mode": "synchronous"},
    {"mode": None},
    {"mode": "sync", "backup_workers": -1},
    {"mode": "sync", "backup_workers": 0.5},
    {"mode": "sync", "backup_workers": True},
    {"backup_workers": 1},
    {"max_staleness": -1},
    {"max_staleness": 1.0},
    {"max_staleness": False},
    {"mode": "sync", "max_staleness": 0},
    {"mode": "sync", "backup_workers": 2},
    {"min_workers": 0},
    {"min_workers": 3},
    {"min_workers": 1.0},
    {"mode": "sync", "min_workers": 1, "backup_workers": 1},
    {"updates": updates.DiLoCo(4)},
    {"updates": 4},
    {"mode": "sync", "updates": updates.Accumulate(2)},
    {"max_staleness": 2, "updates": updates.Accumulate(2)},
    {"mode": "sync", "backup_workers": 1, "updates": updates.LocalSGD(2)},
    {"mode": "sync", "backup_workers": 1, "overlap_steps": True},
    {"updates": "accumulate:2", "overlap_steps": True},
    {"updates": "local_sgd:2", "overlap_steps": True},
    {"overlap_steps": "always"},
    {"overlap_steps": None},
    {"overlap_steps": 1},
    *({name: bad} for name in ("compression", "pull_compression") for bad in UNFIT),
]


@for_each("arguments", REFUSED)
def test_bad_arguments(arguments, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))
    name, value = list(arguments.items())[-1]
    with pytest.raises(ValueError) as error:
        psp.ParameterServerStrategy(**arguments)
    said, _, received = str(error.value).partition("Received: ")
    assert f"`{name}" in said and f"{name}=" in received, error.value
    if name not in ("compression", "pull_compression", "updates"):
        assert f"{name}={value!r}" in received, error.value


@for_each("missing", ["ps", "worker"])
def test_clusters_without_servers_or_workers(missing, monkeypatch):
    cluster = {job: tasks for job, tasks in CLUSTER["cluster"].items() if job != missing}
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ClusterConfigError, match=f"at least one `{missing}` task"):
        psp.ParameterServerStrategy()


def test_good_arguments():
    assert check_mode("async", 0, None) == Mode(False, 0, None)
    assert check_mode("async", 0, 0).max_staleness == 0
    mode = check_mode("sync", 2, None)
    assert mode.is_sync
    mode.check_workers(3)


def test_workers_that_the_launcher_starts_later(monkeypatch):
    is_sync, is_async = Mode(True, 0, None), Mode(False, 0, None)
    assert check_min_workers(None, is_async, 3) == 3
    monkeypatch.setenv("KERAS_PSPLUS_MIN_WORKERS", "2")
    assert check_min_workers(None, is_async, 3) == 2
    assert check_min_workers(1, is_async, 3) == 1
    assert check_min_workers(None, is_sync, 3) == 2
    with pytest.raises(ValueError, match=r"Received: backup_workers=2, for 2 worker"):
        check_min_workers(None, is_sync._replace(backup_workers=2), 3)
    with pytest.raises(ValueError, match="`cluster_resolver`.*Received: min_workers=1"):
        check_no_min_workers(1)


def test_modes_in_which_it_is_measured_whether_steps_overlap():
    sync, asynchronous = check_mode("sync", 0, None), check_mode("async", 0, None)
    assert check_overlap("auto", sync, None) is None
    assert check_overlap("auto", asynchronous, None) is None
    assert check_overlap("auto", check_mode("sync", 1, None), None) is False
    assert check_overlap("auto", check_mode("async", 0, 2), None) is None
    assert check_overlap("auto", asynchronous, updates.Accumulate(2)) is False


# Values are read through compressors that keep all elements.


@for_each("bad", ["gzip", "topk", {"*": "gzip"}])
def test_what_is_unknown_for_values_is_told_what_serves_them(bad):
    with pytest.raises(ValueError) as error:
        Compressors(None, bad)
    assert re.match(r"`pull_compression.*` must be None, \"bf16\",", str(error.value))
    assert "topk:" not in str(error.value) and "powersgd" not in str(error.value)
    assert re.search(r" Received: pull_compression.*=['\"]", str(error.value))


@for_each(
    "bad",
    [
        "sign",
        "topk:0.1",
        "randomk:0.1",
        "powersgd:2",
        compression.NoCommunication(),
        compression.ErrorFeedback(compression.Int8()),
        {"*/kernel": "int8", "*": "sign"},
        compression.ByVariable({}, default=compression.TopK(0.5)),
    ],
)
def test_values_are_not_read_through_what_loses_elements(bad):
    with pytest.raises(ValueError, match=r"`Int8`(.|\n)*Received: pull_compression="):
        Compressors(None, bad)
