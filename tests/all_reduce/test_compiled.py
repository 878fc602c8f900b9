"""Calls of models that XLA compiles under two replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.all_reduce.engine import OneReplicaEngine
from keras_psplus.core.graph import compiled_calls
from tests.all_reduce.compiled_cases import refused, trained
from tests.support.cluster import reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, calls", extended(("branching", 2), ("dense", 2), ("penalised", 2), ("Pair", 4))
)
def test_two_replicas_equal_one_process(name, calls):
    found = run("devices2", trained, name=name).first
    expected = reference(trained, name=name)
    # Each replica's, once in the trace.
    assert found.pop("calls") >= calls
    assert_close(found, expected, 2e-5)


@pytest.mark.processes
def test_what_xla_cannot_compile_is_refused_by_name():
    error = str(run("devices2", refused).first["error"])
    assert "none that XLA can compile: the call of " in error
    assert "cannot compile its While" in error
    assert "Received: jit_compile=True" in error


def test_operations_are_looked_up_in_called_functions():
    @tf.function(autograph=False)
    def hashed(words):
        return tf.strings.to_hash_bucket_fast(words, 5)

    @tf.function(autograph=False)
    def step(words, values):
        return hashed(words), tf.matmul(values, values)

    graph = step.get_concrete_function(tf.TensorSpec([2], tf.string), tf.TensorSpec([3, 3])).graph
    assert compiled_calls.missing_kernels(graph) == ["StringToHashBucketFast"]


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
