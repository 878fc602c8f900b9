"""Compilations are counted by the shapes of tensors, and said once there are more than ten."""

import pytest
import tensorflow as tf

from keras_psplus.core.graph.compiled_calls import MOST, CompilationCount


@pytest.mark.parametrize("is_static", [False, True])
def test_more_than_ten_shapes_are_said_once(is_static, caplog):
    count = CompilationCount("model")

    @tf.function(autograph=False, reduce_retracing=not is_static)
    def step(x, scale):
        count.note("'dense'", [x, scale])
        return tf.reduce_sum(x) * scale

    caplog.set_level("INFO")
    for repeat in range(2):
        for rows in range(1, MOST + 2):
            count.report()
            assert "XLA has compiled" not in caplog.text or repeat
            step(tf.ones([rows, 3]), tf.ones([]))
    count.report()
    assert caplog.text.count("XLA has compiled 'dense' of 'model' 11 times") == 1
    assert "(1, 3)" in caplog.text


def test_ten_are_not(caplog):
    count = CompilationCount("model")
    for rows in range(MOST):
        count.note("'dense'", [tf.TensorSpec([rows])])
    count.note("'other'", [tf.TensorSpec([1])])
    caplog.set_level("INFO")
    count.report()
    assert len(count.forms("'dense'")) == MOST and "XLA" not in caplog.text
