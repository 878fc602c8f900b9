"""Lossy compressors under synchronous parameter servers, in real processes."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.cluster.testing import run_in_processes
from tests.parameter_server.compression_job import LOSSY, ByHand, batch, dense
from tests.parameter_server.sync_compression_job import NAMES, STEPS
from tests.selection import cases

JOB = pathlib.Path(__file__).with_name("sync_compression_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def weights(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sync_compression")
    args = [folder, *cases(request, argument="name")]
    run_in_processes(JOB, workers=2, ps=1, chief=True, timeout=560, env=ENVIRONMENT, args=args)
    with np.load(folder / "weights.npz") as arrays:
        return dict(arrays)


def by_hand(name, before):
    """Each worker sends what it makes of its half of the batch; the mean of the two is applied."""
    model = dense("by_hand")
    hand = ByHand(model, model, LOSSY[name])
    model.set_weights(before)
    variables = model.trainable_variables
    for step in range(STEPS):
        sent, (x, y) = [], batch(step)
        for worker, half in enumerate((slice(0, len(x) // 2), slice(len(x) // 2, None))):
            with tf.GradientTape() as tape:
                loss = model.loss(y[half], model(x[half], training=True))
            gradients = tape.gradient(loss, [v.value for v in variables])
            sent.append([hand._sent(g, (worker, i)) for i, g in enumerate(gradients)])
        model.optimizer.apply([(a + b) / 2 for a, b in zip(*sent)], variables)
        hand._step += 1
    return model.get_weights()


@pytest.mark.parametrize("name", NAMES)
def test_what_both_workers_have_sent_is_averaged(name, weights):
    before = [weights[f"{name} before/{i}"] for i in range(4)]
    for i, expected in enumerate(by_hand(name, before)):
        np.testing.assert_allclose(weights[f"{name}/{i}"], expected, rtol=0, atol=2e-6)


def test_a_resumed_run_has_the_residuals_of_each_worker(weights):
    for i in range(4):
        whole, resumed = (weights[f"powersgd {how}/{i}"] for how in ("whole", "resumed"))
        np.testing.assert_allclose(resumed, whole, rtol=0, atol=1e-6)
