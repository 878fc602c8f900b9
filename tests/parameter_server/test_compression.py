"""Compressed gradients and reads: equal to the same steps taken by hand, counted, and saved."""

import pytest
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.parameter_server import pulls
from keras_psplus.parameter_server.pulls import Compressors
from tests.parameter_server import compression_cases as cases
from tests.support.cluster import run
from tests.support.tables import for_each
from tests.support.tiers import extended

processes = pytest.mark.processes


# "int8" and "sign" are compared below.
@processes
@pytest.mark.parametrize("name", ["topk_corrected", "own"])
def test_gradients_are_those_of_steps_by_hand(name):
    run("async_threads", cases.as_by_hand, name=name)


@processes
@pytest.mark.parametrize(
    ("case", "shards"),
    [
        (cases.rows_of_embeddings_as_by_hand, 2),
        (cases.nan_reaches_the_weights_but_no_state, None),
        (cases.bytes_are_counted, None),
        (cases.compressed_bytes_are_counted, None),
        (cases.state_is_saved_and_restored, None),
        *extended(
            (cases.several_steps_of_one_call_as_by_hand, None),
            (cases.rounded_lookups_as_by_hand, None),
            (cases.rounded_reads_as_by_hand, None),
            (cases.skipped_steps_change_no_state, None),
            (cases.bytes_that_differ_from_step_to_step_are_counted, None),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_worker(case, shards):
    run("async_threads", case, shards=shards)


@processes
@pytest.mark.parametrize("layout", ["sync_threads", *extended("async_threads", "sync_sharded")])
def test_gradients_go_without_their_loss_scale(layout):
    run(layout, cases.gradients_go_without_their_loss_scale)


@pytest.mark.extended
@processes
def test_what_two_synchronous_workers_have_sent_is_averaged():
    run("sync22", cases.as_by_hand, name="powersgd", workers=2)


@for_each("good", ["bf16", "int8", compression.Int8(stochastic=True), {"*": "fp16", "a": None}])
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

    with tf.Graph().as_default(), pytest.raises(ValueError, match="cannot keep a state"):
        pulls.read_together([tf.Variable(tf.zeros([64, 64]))], [Stateful()], [("", "pull", None)])
