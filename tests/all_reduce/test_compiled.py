"""Calls of models that XLA compiles under two replicas."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.all_reduce.one_replica_engine import OneReplicaEngine
from keras_psplus.core.graph import xla_operations

pytestmark = pytest.mark.timeout(1500)

JOB = pathlib.Path(__file__).with_name("compiled_job.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "results.json"
    done = subprocess.run(
        [sys.executable, str(JOB), path], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(pathlib.Path(path).read_text())


@pytest.mark.parametrize(("name", "calls"), [("dense", 2), ("pair", 4), ("recurrent", 4)])
def test_two_replicas_equal_one_compiled_process(name, calls, results):
    # Each replica's, once in the trace.
    assert results[f"{name} calls"] >= calls
    two, one = results[name], results[f"{name} alone"]
    assert set(two["logs"]) == set(one["logs"])
    for key, values in one["logs"].items():
        np.testing.assert_allclose(two["logs"][key], values, rtol=2e-5, atol=2e-5, err_msg=key)
    for found, expected in zip(two["weights"], one["weights"]):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "whole", "calls"), [("noisy", "noisy", 8), ("recurrent", "recurrent alone", 6)]
)
def test_parts_of_a_model_are_what_the_model_is(name, whole, calls, results):
    assert results[f"{name} in parts calls"] == calls
    found, expected = results[f"{name} in parts"], results[whole]
    for key, values in expected["logs"].items():
        np.testing.assert_allclose(found["logs"][key], values, rtol=2e-5, atol=2e-5, err_msg=key)
    for one, other in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_what_xla_cannot_compile_is_refused_by_name(results):
    assert "none that XLA can compile: the call of " in results["loop"]
    assert "cannot compile its While" in results["loop"]
    assert "Received: jit_compile=True" in results["loop"]


def test_operations_are_looked_up_in_called_functions():
    @tf.function(autograph=False)
    def hashed(words):
        return tf.strings.to_hash_bucket_fast(words, 5)

    @tf.function(autograph=False)
    def step(words, values):
        return hashed(words), tf.matmul(values, values)

    graph = step.get_concrete_function(tf.TensorSpec([2], tf.string), tf.TensorSpec([3, 3])).graph
    assert xla_operations.missing(graph) == ["StringToHashBucketFast"]


@pytest.mark.parametrize(
    ("arguments", "compiles"),
    [({}, True), ({"jit_compile": False}, False), ({"run_eagerly": True}, False)],
)
def test_one_replica_on_a_gpu_is_compiled_as_alone(arguments, compiles, monkeypatch):
    strategy = psp.MultiWorkerMirroredStrategy()
    monkeypatch.setattr(OneReplicaEngine, "compiles_by_default", True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **arguments)
    assert model.jit_compile is compiles
    history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, epochs=2).history
    assert history["loss"][1] < history["loss"][0]
