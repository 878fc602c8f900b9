"""Training with a dynamic table on parameter servers equals training in one process."""

import contextlib
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.parameter_server.worker_function import Trace
from tests.hybrid import dynamic_cases as dynamic_job
from tests.parameter_server.options import options
from tests.support.cluster import reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended


def train(name, *callbacks):
    """Trains, and evaluates ids of which some have no row."""
    x, y = dynamic_job.data()
    other = dynamic_job.as_ids(name, x[:40] + [0, 0, 0, 0, 1])
    checked = tf.data.Dataset.from_tensor_slices((other, y[:40])).batch(12)
    fit = {"validation_data": checked, "callbacks": list(callbacks)}
    return dynamic_job.train(name, dynamic_job.as_ids(name, x), y, **fit)


def trained(strategy, name):
    with options(strategy), strategy.scope():
        model, table, found = train(name)
        found |= dynamic_job.contents(model, table)
        return found | dynamic_job.moved(name, model, table)


def briefly_trained(strategy, name):
    with options(strategy), strategy.scope():
        return dynamic_job.train_briefly(name)


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("name", ["counted", "bounded"])
def test_synchronous_training_equals_one_process(name):
    found = run("sync22", briefly_trained, name=name).first
    assert len(found["table_keys"])
    expected = reference(dynamic_job.train_briefly, dynamic_job.ALONE, name=name)
    assert_close(found, expected, 5e-5)


def trained_on_sequences(strategy):
    with options(strategy), strategy.scope():
        return dynamic_job.train_sequences()


@pytest.mark.extended
@pytest.mark.processes
def test_padding_has_no_row_on_servers():
    found = run("sync22", trained_on_sequences).first
    expected = reference(dynamic_job.train_sequences, dynamic_job.ALONE)
    assert_close(found, expected, 5e-5)


def halves(strategy, folder):
    """Breaks training off, and goes on in another model."""
    with options(strategy), strategy.scope():
        for last in [dynamic_job.BreakOff()], []:
            backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=2)
            with contextlib.suppress(InterruptedError):
                found = dynamic_job.halves(callbacks=[backup, *last])
        return found


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["async_threads", *extended("sync22")])
def test_rows_in_16_bits_are_the_bits_of_one_process_after_a_break(layout, tmp_path):
    expected = reference(dynamic_job.halves, dynamic_job.ALONE)
    found = run(layout, halves, folder=str(tmp_path)).first
    dynamic_job.check_halves(found, expected)


class LooksTwice(keras.Model):
    """Looks rows up again once their gradients are applied."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"later": tf.reduce_mean(self(data[0]))}


def looked_up_later(strategy):
    with options(strategy), strategy.scope():
        ids = keras.Input((2,), dtype="int64")
        rows = keras.layers.Flatten()(psp.layers.DynamicEmbedding(4, name="ids")(ids))
        model = LooksTwice(ids, keras.layers.Dense(1, trainable=False)(rows))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="ids/table, read after sgd.apply"):
        model.fit(np.ones((8, 2), "int64"), np.ones((8, 1)), batch_size=4, verbose=0)
    return {}


@pytest.mark.processes
def test_rows_that_are_read_after_they_are_updated_are_refused():
    run("sync22", looked_up_later, may_show_errors=True)


def broken_off(strategy, folder):
    """Breaks training off, goes on in another model, and writes it in all ways."""
    folder, (x, y) = pathlib.Path(folder), dynamic_job.data()
    ids = dynamic_job.as_ids("counted", x[:21])
    with options(strategy), strategy.scope():
        for last in [dynamic_job.BreakOff()], []:
            backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=2)
            publish = psp.serving.PublishTables(folder / "published", every=2)
            with contextlib.suppress(InterruptedError):
                model, table, found = train("counted", backup, publish, *last)
        found |= dynamic_job.contents(model, table)
        reader = psp.serving.TableReader(folder / "published", poll=None)
        np.testing.assert_array_equal(reader.lookup(table.keys), table.table.numpy())
        assert reader.count() == len(table.keys)
        model.export(folder / "exported", verbose=False)
        exported = tf.saved_model.load(folder / "exported")
        np.testing.assert_allclose(exported.serve(ids), found["predicted"], atol=1e-6)
        # Weights come into a model of other rows.
        path = folder / "model.weights.h5"
        model.save_weights(path)
        dynamic_job.train_more(model, "counted", x[: dynamic_job.BATCH], y[: dynamic_job.BATCH])
        model.load_weights(path)
        for what, value in dynamic_job.contents(model, table).items():
            np.testing.assert_array_equal(value, found[what], err_msg=what)
        return found | dynamic_job.moved("counted", model, table)


@pytest.mark.extended
@pytest.mark.processes
def test_synchronous_training_that_was_broken_off_equals_one_process(tmp_path):
    found = run("sync22", broken_off, folder=tmp_path).first
    expected = run("hybrid1", trained, name="counted").first
    assert len(found["table_keys"])
    assert_close(found, expected, 5e-5)


def test_an_asynchronous_step_applies_a_gradient_once_and_always():
    @tf.function
    def step(initial):
        trace, table = Trace(initial), object()
        number = trace.keep(table, "t")
        for other in (table, object()):
            with pytest.raises(ValueError, match="Received: the table 't'"):
                tf.cond(number > 0, lambda other=other: trace.keep(other, "t"), lambda: number)
        with pytest.raises(ValueError, match="once"):
            trace.keep(table, "t")
        return number

    assert step(tf.constant([0.5, 17.0], tf.float64)).numpy() == 17
