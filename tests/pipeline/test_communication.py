"""Bytes that a pipeline counts, beside those that can be computed by hand."""

import collections
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.pipeline import strategy as pipeline_strategy
from tests.support.cluster import makes_scope, run

pytestmark = pytest.mark.processes

ROWS, INPUTS, WIDTH, CLASSES = 40, 64, 96, 10


def dense():
    stack = [keras.layers.Dense(WIDTH, name=name) for name in "abc"]
    stack.append(keras.layers.Dense(CLASSES, name="d"))
    model = keras.Sequential([keras.Input((INPUTS,)), *stack], name="stack")
    x, y = np.ones((ROWS, INPUTS), "float32"), np.zeros(ROWS)
    # Batches of 32 rows and of 8.
    return model, tf.data.Dataset.from_tensor_slices((x, y)).batch(32)


# Of float32. The third layer gets the activations of the second.
CROSSING = ROWS * WIDTH * 4
KERNELS = [INPUTS * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * CLASSES]
BIASES = 3 * WIDTH + CLASSES
WEIGHTS = 4 * (sum(KERNELS) + BIASES)
STEPS = 2
FORWARD, BACKWARD = ("stage 0 -> stage 1", "forward"), ("stage 1 -> stage 0", "backward")
# One pipeline has half of the rows.
OUTPUTS = ROWS // 2 * CLASSES * 4


def in_stages(pipelines=1, **options):
    """Strategy of two stages, on two or four devices."""
    devices = pipeline_strategy.local_devices()[: 2 * pipelines]
    with mock.patch.object(pipeline_strategy, "local_devices", lambda: devices):
        return psp.PipelineStrategy(
            2, stages=[["a", "b"], ["c", "d"]], pipelines=pipelines, **options
        )


@makes_scope
def counted(scope, evaluates=False, **options):
    """Trains in stages; returns what was counted.

    What is sent to evaluate and to predict does not count.
    """
    strategy = in_stages(**options)
    with strategy.scope():
        model, data = dense()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(global_clipnorm=1.0), loss, metrics=["accuracy"])
    monitor = psp.callbacks.CommunicationMonitor()
    others = data if evaluates else None
    logs = model.fit(data, validation_data=others, callbacks=[monitor], verbose=0).history
    if evaluates:
        model.predict(data, verbose=0)
    traffic = strategy.communication.traffic()
    return {
        "ways": [(one.path, one.direction, str(one.compressor)) for one in traffic],
        "bytes": [(one.logical_bytes, one.compressed_bytes, one.wire_bytes) for one in traffic],
        "of a step": logs["comm/bytes"],
        "ratio": logs["comm/ratio"],
    }


def count(**options):
    """The rows that were counted, and logs."""
    found = run("pipelines4", counted, **options).first
    rows = [(*way, *sizes) for way, sizes in zip(found["ways"], found["bytes"].tolist())]
    return rows, found


def by_direction(rows):
    """Logical and compressed bytes, by direction; paths of pipelines count as a direction."""
    sums = collections.defaultdict(lambda: [0, 0])
    for path, direction, _, logical, compressed, wire in rows:
        assert wire == compressed
        key = (path, direction) if direction in ("forward", "backward") else direction
        sums[key][0] += logical
        sums[key][1] += compressed
    return dict(sums)


def test_activations_and_their_gradients():
    rows, logs = count(schedule="1f1b", evaluates=True)
    assert by_direction(rows) == {FORWARD: [CROSSING] * 2, BACKWARD: [CROSSING] * 2}
    assert logs["of a step"] == [2 * CROSSING / STEPS]
    assert logs["ratio"] == [1.0]


def test_activation_compression():
    # Micro-batches of the second batch have fewer than 1,024 numbers, and go as they are.
    small = CROSSING // 5
    large = CROSSING - small
    expected = {
        (*way, *numbers)
        for way in (FORWARD, BACKWARD)
        for numbers in (("Cast()", large, large // 2), ("None", small, small))
    }
    rows, logs = count(activation_compression="bf16", schedule="gpipe")
    assert {tuple(row[:-1]) for row in rows} == expected
    assert logs["ratio"] == [CROSSING / (large // 2 + small)]


@makes_scope
def scaled(scope, factor):
    strategy = in_stages(activation_compression="fp16")
    with strategy.scope():
        model, data = dense()
        model.compile(keras.optimizers.SGD(0.1, loss_scale_factor=factor), "mse")
    monitor = psp.callbacks.CommunicationMonitor()
    data = data.map(lambda x, y: (x, -x[:, :CLASSES]))
    model.fit(data, callbacks=[monitor], verbose=0)
    traffic = strategy.communication.traffic()
    return model, {"bytes": sorted({(one.logical_bytes, one.compressed_bytes) for one in traffic})}


def test_gradients_of_activations_are_cast_without_the_loss_scale():
    # By which they would be too large for float16. A power of two changes no bit of the others.
    one, large = (run("pipelines4", scaled, factor=factor).first for factor in (None, 2.0**30))
    # Both ways alike, though gradients of this loss do not know their rows.
    small, all_others = CROSSING // 5, CROSSING - CROSSING // 5
    assert one["bytes"].tolist() == [[small, small], [all_others, all_others // 2]]
    for name in one:
        np.testing.assert_array_equal(large[name], one[name], name)


@pytest.mark.extended
def test_pipelines():
    rows, _ = count(pipelines=2, schedule="gpipe")
    assert by_direction(rows) == {
        FORWARD: [CROSSING] * 2,
        BACKWARD: [CROSSING] * 2,
        "gradient": [STEPS * WEIGHTS] * 2,
        "weight": [STEPS * WEIGHTS] * 2,
        # The loss is that of the whole batch.
        ("pipeline 1 -> pipeline 0", "forward"): [OUTPUTS] * 2,
        ("pipeline 0 -> pipeline 1", "backward"): [OUTPUTS] * 2,
    }
    paths = {path for path, direction, *_ in rows if direction == "weight"}
    assert paths == {f"stack/{layer}/{name}" for layer in "abcd" for name in ("kernel", "bias")}


def test_gradients_between_pipelines_are_compressed():
    rows, _ = count(pipelines=2, compression="bf16")
    assert by_direction(rows) == {
        FORWARD: [CROSSING] * 2,
        BACKWARD: [CROSSING] * 2,
        "gradient": [STEPS * WEIGHTS, STEPS * WEIGHTS // 2],
        "weight": [STEPS * WEIGHTS] * 2,
        # Outputs for metrics, and targets (float64), which metrics and the loss use.
        ("pipeline 1 -> pipeline 0", "forward"): [OUTPUTS] * 2,
        ("pipeline 0 -> pipeline 1", "backward"): [ROWS // 2 * 8] * 2,
    }
