"""Compressed gradients and reads: equal to the same steps taken by hand, counted, and saved."""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus import compression
from keras_psplus.cluster.environment import python_path
from keras_psplus.parameter_server.transport.compressors import Compressors
from tests.selection import cases

JOB = pathlib.Path(__file__).with_name("compression_job.py")
NAMED = re.findall(r"^@behaviour\ndef (\w+)\(", JOB.read_text(), re.MULTILINE)
BY_HAND = re.findall(r'"(\w+)"', re.search(r"^for _name in \((.*)\):", JOB.read_text(), re.M)[1])
WHOLE = [f"{name}_as_by_hand" for name in BY_HAND] + NAMED
SHARDED = [
    "topk_corrected_as_by_hand",
    "rows_of_embeddings_as_by_hand",
    "compressed_bytes_are_counted",
]


def run(folder, *args):
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": python_path(os.environ),
    }
    environment.pop("TF_CONFIG", None)
    done = subprocess.run(
        [sys.executable, str(JOB), str(folder), *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """Jobs with whole and with sharded variables: what each behaviour has left in, and the log."""
    whole = ["test_whole_variables", "test_a_new_process_goes_on_from_the_saved_state"]
    names = {
        ("whole", "0"): cases(request, *whole, argument="name"),
        ("sharded", "2"): cases(request, "test_sharded_variables", argument="name"),
    }
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = {}
        for (kind, shards), chosen in names.items():
            if chosen:
                folder = tmp_path_factory.mktemp(kind)
                runs[kind] = folder, pool.submit(run, folder, shards, *chosen)
    return {kind: (folder, one.result()) for kind, (folder, one) in runs.items()}


def failure(jobs, kind, name):
    folder, log = jobs[kind]
    failures = json.loads((folder / "failures.json").read_text())
    assert name in failures, log[-8000:]
    return failures[name]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_variables(name, jobs):
    found = failure(jobs, "whole", name)
    assert not found, found


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_variables(name, jobs):
    found = failure(jobs, "sharded", name)
    assert not found, found


@pytest.mark.cases("state_is_saved_and_restored")
def test_a_new_process_goes_on_from_the_saved_state(jobs):
    found = failure(jobs, "whole", "state_is_saved_and_restored")
    assert not found, found
    folder, _ = jobs["whole"]
    run(folder, "0", "resume")


class OnlyExchange(compression.Compressor):
    def exchange(self, tensor, state, step):
        yield []


LOSSLESS_ENOUGH = ["bf16", "int8", compression.Int8(stochastic=True), {"*": "fp16", "a": None}]
NOT_FOR_VALUES = [
    "sign",
    "topk:0.1",
    "randomk:0.1",
    "powersgd:2",
    compression.NoCommunication(),
    compression.ErrorFeedback(compression.Int8()),
    {"*/kernel": "int8", "*": "sign"},
    compression.ByVariable({}, default=compression.TopK(0.5)),
]


@pytest.mark.parametrize("argument", ["compression", "pull_compression"])
@pytest.mark.parametrize(
    "bad", ["int9", "topk", 3, OnlyExchange(), {"*": OnlyExchange()}, "factors"]
)
def test_unfit_compressors_are_refused_before_anything_starts(argument, bad, monkeypatch):
    # In a server, where the constructor would not return.
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}, "task": {"type": "ps", "index": 0}}')
    with pytest.raises(ValueError, match=r"Received: "):
        psp.ParameterServerStrategy(**{argument: bad})


@pytest.mark.parametrize("bad", ["gzip", "topk", {"*": "gzip"}])
def test_what_is_unknown_for_values_is_told_what_serves_them(bad):
    with pytest.raises(ValueError) as error:
        Compressors(None, bad)
    assert re.match(r"`pull_compression.*` must be None, \"bf16\",", str(error.value))
    assert "topk:" not in str(error.value) and "powersgd" not in str(error.value)
    assert re.search(r" Received: pull_compression.*=['\"]", str(error.value))


@pytest.mark.parametrize("bad", NOT_FOR_VALUES, ids=repr)
def test_values_are_not_read_through_what_loses_elements(bad):
    with pytest.raises(ValueError, match=r"`Int8`(.|\n)*Received: pull_compression="):
        Compressors(None, bad)


@pytest.mark.parametrize("good", LOSSLESS_ENOUGH, ids=repr)
def test_values_are_read_through_what_keeps_all_elements(good):
    assert Compressors(None, good).of_value(tf.Variable(tf.zeros([64, 64])))


def test_which_variables_are_compressed():
    def variable(shape, dtype="float32", trainable=True):
        return tf.Variable(tf.zeros(shape, dtype), trainable=trainable)

    compressors = Compressors("int8", "bf16")
    kernel = variable([64, 64])
    assert repr(compressors.of_gradient(kernel)).startswith("ErrorFeedback(inner=Int8(")
    assert repr(compressors.of_value(kernel)).startswith("Cast(")
    for other in (
        variable([4096]),
        variable([10, 10]),
        variable([64, 64], trainable=False),
        variable([64, 64], "int32", trainable=False),
    ):
        assert compressors.of_value(other) is None
    assert compressors.of_gradient(variable([64, 64], "int32", trainable=False)) is None
    assert Compressors(None, None).of_gradient(kernel) is None
    kernel.keras_path = "model/dense/kernel"
    by_path = Compressors({"model/*": "sign", "*": None}, {"*/dense/*": None, "*": "bf16"})
    assert by_path.of_gradient(kernel).inner.block_size == 1024
    assert by_path.of_value(kernel) is None


def test_read_values_keep_no_state():
    class Stateful(compression.Cast):
        def init(self, shape, dtype):
            return tf.zeros(shape)

    from keras_psplus.parameter_server.transport import reads

    with tf.Graph().as_default(), pytest.raises(ValueError, match="cannot keep a state"):
        reads.read_together([tf.Variable(tf.zeros([64, 64]))], [Stateful()], [("", "pull", None)])
