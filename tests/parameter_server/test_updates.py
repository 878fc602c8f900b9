"""Update policies under parameter servers, beside what one process computes on the same batches."""

import contextlib
import gc

import keras
import numpy as np
import pytest

from keras_psplus import updates
from tests.all_reduce import updates_cases
from tests.all_reduce.updates_cases import ACCUMULATED, dense, embedding, fit, problem
from tests.parameter_server.options import options
from tests.support import parts
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_all_close, assert_close, assert_same, weights_of
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


def training(strategy, policy, compression=None):
    """Context in which one worker trains variables that are cut; in plain Keras, of nothing."""
    stack = contextlib.ExitStack()
    if strategy is not None:
        stack.enter_context(
            options(strategy, updates=policy, compression=compression, partitioner=2)
        )
        stack.enter_context(strategy.scope())
    return stack


def sent(strategy):
    """Bytes of gradients that have been sent."""
    found = [one for one in strategy.communication.traffic() if one.direction == "gradient"]
    return sum(one.logical_bytes for one in found)


def named(kind, weights):
    return {f"{kind}/{i}": weight for i, weight in enumerate(weights)}


def size_of(weights):
    return sum(weight.nbytes for weight in weights)


def accumulated(strategy, name):
    with training(strategy, updates.Accumulate(**ACCUMULATED[name][1])):
        model = updates_cases.train_accumulated(strategy, name)
        number = updates_cases.number_of_updates(model)
        return model, {"updates": number, "sent": sent(strategy)}


# Under parameter servers nothing runs eagerly; "optimizers" is "flush" without the flush.
@pytest.mark.parametrize("name", ["flush", *extended("loss_scale")])
def test_accumulating_equals_one_process_on_larger_batches(name):
    expected = reference(updates_cases.on_larger_batches, name=name)
    found = run("async_threads", accumulated, name=name).first
    assert_all_close(weights_of(found), weights_of(expected), 2e-6)
    assert found["updates"] == expected["updates"] > 0
    assert found["sent"] == found["updates"] * size_of(weights_of(found))


def accumulated_by_keras(strategy):
    """Keras's own accumulation: the gradients of five of eight batches, then a sum."""
    with training(strategy, None):
        model = dense(keras.optimizers.SGD(0.3, gradient_accumulation_steps=3))
    fit(model, 2)
    assert strategy is None or sent(strategy) == 2 * size_of(model.get_weights())
    return model, {}


class Look(keras.callbacks.Callback):
    """Evaluates in the middle of a round."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.evaluate(*problem(), verbose=0)
            self.weights = self.model.get_weights()


def looked_at(strategy):
    """Who evaluates sees the steps that were taken alone."""
    with training(strategy, updates.LocalSGD(100)):
        model, look = dense("sgd"), Look()
        fit(model, 1, [look])
    return named("weights", look.weights)


@pytest.mark.parametrize(
    "case", [looked_at, *extended(accumulated_by_keras)], ids=lambda case: case.__name__
)
def test_equals_one_process(case):
    equals_one_process("async_threads", case, tolerance=2e-6)


def finished(strategy):
    """What an epoch leaves waits, is known of, and is sent when the script says so."""
    # A compressor that loses nothing sees the sums.
    with training(strategy, updates.Accumulate(3), "topk:1.0"):
        model = dense("sgd")
        fit(model, 1)
        updating, iterations = strategy._context.updating, model.optimizer.iterations
        assert (updating.pending, int(iterations.numpy())) == ({0: 1}, 1)
        strategy.finish_updates(model.optimizer)
        strategy.finish_updates(model.optimizer)
        assert (updating.pending, int(iterations.numpy())) == ({}, 2)
        return model, {}


def finished_in_one_process():
    model, (x, y) = dense("sgd"), problem()
    for rows in (slice(0, 30), slice(30, 37)):
        model.train_on_batch(x[rows], y[rows])
    return model, {}


def test_what_waits_is_known_and_can_be_sent():
    found = run("async_threads", finished).first
    assert_close(found, reference(finished_in_one_process), 2e-6)


# Of one worker alone, they come to the same as without the policy. How often all weights are sent,
# in epochs of four batches; momenta, and moving averages of weights, are sent as well.
LOCAL = {
    "post-local": (
        updates.LocalSGD(3, start_step=6),
        lambda: dense(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.8)),
        2 * (6 + 1 + 2),
    ),
    "embedding": (updates.LocalSGD(2, average_slots=True), embedding, 2 * 6),
}


def local(strategy, name):
    policy, build, rounds = LOCAL[name]
    with training(strategy, policy):
        model = build()
        fit(model)
        assert strategy is None or sent(strategy) == rounds * size_of(model.get_weights())
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return model, {f"slot {i}": variable.numpy() for i, variable in enumerate(inner.variables)}


@pytest.mark.parametrize("name", ["post-local", *extended("embedding")])
def test_steps_alone_of_one_worker_come_to_the_same(name):
    equals_one_process("async_threads", local, tolerance=2e-6, name=name)


def refused(strategy):
    with training(strategy, updates.LocalSGD(3)):
        model = updates_cases.OfParts(keras.optimizers.SGD(0.1))
        model.compile()
        with pytest.raises(ValueError, match=r"(?s)an attribute of the model.*Received: "):
            fit(model)


def test_an_optimizer_that_cannot_be_copied_is_refused():
    run("async_threads", refused)


def resumed(strategy, folder):
    def train(*callbacks):
        # A resumed state is found by an optimizer's name, that of no other one that lives, which
        # in another process is the same.
        keras.utils.clear_session()
        gc.collect()
        keras.utils.set_random_seed(1)
        with training(strategy, updates.LocalSGD(3), "topk:0.3"):
            model = updates_cases.with_dropout()
            fit(model, 4, callbacks)
            return model.get_weights()

    # Workers that step alone send what they have for a backup.
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=3)
    found = named("whole", train(backup))
    return found | named("resumed", parts.resumed(train, 1, save_freq=3))


@pytest.mark.extended
def test_resumed_training_is_as_if_never_interrupted(tmp_path):
    found = run("async_threads", resumed, folder=tmp_path).first
    assert_same(weights_of(found, "resumed"), weights_of(found, "whole"))


# Two workers; the gradient is one, whatever the weights are. `test_jobs.py` kills one of them.

WIDTH, RATE = 1000, 0.5


def of_ones(strategy, policy, batches, *callbacks):
    """How often its kernel was sent and read in two epochs, and updated."""
    with options(strategy, updates=policy), strategy.scope():
        zeros = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((WIDTH,)), zeros])
        model.compile(keras.optimizers.SGD(RATE), lambda y, output: output)
        x = np.ones((2 * batches, WIDTH), "float32")
        fit = dict(batch_size=2, epochs=2, verbose=0, callbacks=list(callbacks))
        model.fit(x, x[:, :1], **fit)
        found = {"gradient": 0, "pull": 0, "iterations": model.optimizer.iterations.numpy()}
        for one in strategy.communication.traffic():
            if "kernel" in one.path:
                found[one.direction] += one.wire_bytes // (4 * WIDTH)
        return found


def summed_by_two(strategy):
    return of_ones(strategy, updates.Accumulate(4, flush=True), 30)


@pytest.mark.extended
def test_two_workers_send_sums():
    found = run("async22", summed_by_two).first
    # Of 30 batches, each worker has updated with every four, and with the rest at the epoch's end.
    assert 16 <= found["iterations"] <= 18
    assert found["gradient"] == found["iterations"] and found["pull"] == 60


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.means = []

    def on_epoch_end(self, epoch, logs=None):
        self.means.append(self.model.get_weights()[0].mean())


def alone_by_two(strategy):
    seen = Seen()
    return of_ones(strategy, updates.LocalSGD(5), 42, seen) | {"seen": seen.means}


def test_two_workers_add_up_what_they_have_changed():
    found = run("async22", alone_by_two).first
    # Each step counts once, and its change by half; callbacks see all of it at an epoch's end.
    assert found["iterations"] == 84
    assert found["seen"].tolist() == [-RATE * 42 / 2, -RATE * 84 / 2]
    # Of 42 steps, each worker begins a round with every five.
    assert 2 * 9 <= found["gradient"] <= 2 * 10
    # Each round reads once, and so may a worker that comes late to its first copies.
    assert 0 <= found["pull"] - found["gradient"] <= 2
