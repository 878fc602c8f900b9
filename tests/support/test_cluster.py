"""Clusters that stay up: cases equal one process, and what goes wrong is seen."""

import os

import keras
import numpy as np
import pytest

from tests.support.cluster import equals_one_process, run

pytestmark = pytest.mark.processes


def trained(rows=9):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, x[:, :2], batch_size=4, shuffle=False, verbose=0)
    return model, history.history


def of_one_worker_alone():
    import tensorflow as tf

    if tf.distribute.get_strategy().task.name == "worker-1":
        raise ValueError("on one worker")
    return {}


def wrong_everywhere():
    raise ValueError("everywhere")


def process():
    return {"pid": os.getpid()}


def test_a_case_equals_one_process():
    equals_one_process("ar2", trained, rows=11)


def test_a_case_that_fails_everywhere_leaves_the_cluster():
    before = run("ar2", process, same=False)
    with pytest.raises(AssertionError, match="ValueError: everywhere"):
        run("ar2", wrong_everywhere)
    assert run("ar2", process, same=False) == before
    with pytest.raises(AssertionError, match="differs in pid"):
        run("ar2", process)


def test_a_case_on_which_tasks_differ_ends_the_cluster():
    before = run("ar2", process, same=False)
    with pytest.raises(AssertionError, match="Tasks differ"):
        run("ar2", of_one_worker_alone)
    assert run("ar2", process, same=False) != before
