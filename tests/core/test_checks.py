"""Layers that several replicas cannot share."""

import types

import keras
import pytest

from keras_psplus.core.base import checks


def model(stateful=True):
    layers = [
        keras.Input(batch_shape=(4, 3, 2)),
        keras.layers.Bidirectional(keras.layers.LSTM(2, stateful=stateful, name="memory")),
    ]
    return keras.Sequential(layers)


@pytest.mark.parametrize("replicas, workers", [(2, 2), (1, 2), (2, 1)])
def test_stateful_layers_are_refused_by_name(replicas, workers):
    strategy = types.SimpleNamespace(num_replicas_in_sync=replicas, num_workers=workers)
    stateful = r"'((forward|backward)_memory)' is stateful.*Received: \1"
    with pytest.raises(ValueError, match=stateful):
        checks.check_layers(strategy, model())
    checks.check_layers(strategy, model(stateful=False))


def test_statistics_of_all_rows_are_refused_in_micro_batches():
    normal = keras.layers.BatchNormalization(synchronized=True, name="normal")
    strategy = types.SimpleNamespace(num_replicas_in_sync=1, microbatches=2, pipelines=2)
    with pytest.raises(ValueError, match="Received: normal, .* in 4 micro-batches"):
        checks.check_layers(strategy, keras.Sequential([normal]))
    strategy.microbatches = strategy.pipelines = 1
    checks.check_layers(strategy, keras.Sequential([normal]))


def test_one_replica_may_have_stateful_layers():
    strategy = types.SimpleNamespace(num_replicas_in_sync=1, num_workers=1)
    checks.check_layers(strategy, model())
