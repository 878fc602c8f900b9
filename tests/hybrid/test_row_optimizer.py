"""Keras's optimizers on some rows of a table: as on all of it, for the rows that are touched."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.tables.row_optimizer import (
    RowOptimizer,
    check_elementwise,
    config_of,
    scalars_of,
)
from tests.support.tables import for_each

optimizers = keras.optimizers
RATE = 0.1
BY_ROWS = {
    "sgd": lambda: optimizers.SGD(RATE),
    "nesterov": lambda: optimizers.SGD(RATE, momentum=0.9, nesterov=True),
    "adagrad": lambda: optimizers.Adagrad(RATE, initial_accumulator_value=0.3),
    "adam": lambda: optimizers.Adam(RATE, amsgrad=True),
    "adam_w": lambda: optimizers.AdamW(RATE, weight_decay=0.1),
    "rms_prop": lambda: optimizers.RMSprop(RATE, centered=True, momentum=0.5),
    "ftrl": lambda: optimizers.Ftrl(RATE, l1_regularization_strength=0.1),
    "lion": lambda: optimizers.Lion(RATE),
    "nadam": lambda: optimizers.Nadam(RATE),
    "adadelta": lambda: optimizers.Adadelta(RATE),
    "adamax": lambda: optimizers.Adamax(RATE),
    "clipvalue": lambda: optimizers.SGD(RATE, clipvalue=0.5),
}
NOT_BY_ROWS = ["Lamb", "Adafactor", "Muon"]


def rows_of(optimizer, weights, **kwargs):
    options = {"constraint": None, "regularizer": None, **kwargs}
    return RowOptimizer(config_of(optimizer, optimizer.weight_decay, **options), weights)


@pytest.mark.parametrize("name", BY_ROWS)
def test_equals_keras_on_the_rows_that_are_touched(name):
    random = np.random.default_rng(1)
    start = random.normal(size=(5, 4)).astype("float32")
    touched = [3, 0]
    optimizer, variable = BY_ROWS[name](), keras.Variable(start[touched])
    check_elementwise(config_of(optimizer, None, None, None))
    optimizer.build([variable])
    weights = tf.Variable(start)
    rows = rows_of(BY_ROWS[name](), weights)

    @tf.function
    def apply(*args):
        rows.apply(*args)

    for step in range(3):
        gradient = random.normal(size=(2, 4)).astype("float32")
        optimizer.apply([tf.constant(gradient)])
        scalars = tf.constant([float(s) for s in scalars_of(optimizer)], tf.float32)
        apply(
            tf.constant(touched),
            tf.constant(gradient),
            tf.constant(RATE),
            scalars,
            tf.constant(step, tf.int64),
        )
    np.testing.assert_allclose(weights.numpy()[touched], variable.numpy(), rtol=1e-6, atol=1e-7)
    others = [1, 2, 4]
    np.testing.assert_array_equal(weights.numpy()[others], start[others])


@for_each("name", NOT_BY_ROWS)
def test_check_names_those_that_need_the_whole(name):
    optimizer = getattr(optimizers, name)()
    with pytest.raises(ValueError, match=f"(?i)cannot be applied to the rows.*optimizer={name}"):
        check_elementwise(config_of(optimizer, None, None, None))


@for_each(
    "constraint, is_by_rows",
    [
        (keras.constraints.MaxNorm(0.05, axis=1), True),
        (keras.constraints.MinMaxNorm(0.1, 0.5, axis=-1), True),
        (keras.constraints.NonNeg(), True),
        (keras.constraints.MaxNorm(0.05), False),
        # It does nothing to small weights.
        (keras.constraints.MaxNorm(1000.0), False),
        (keras.constraints.UnitNorm(), False),
    ],
)
def test_check_names_constraints_of_all_rows_together(constraint, is_by_rows):
    config = config_of(optimizers.SGD(), None, constraint, None)
    if is_by_rows:
        check_elementwise(config)
        return
    name = type(constraint).__name__
    message = f"constraint {name} cannot be applied to single rows .* axis=1.* Received: {name}"
    with pytest.raises(ValueError, match=message):
        check_elementwise(config)


@keras.saving.register_keras_serializable()
class AtMost(keras.constraints.Constraint):
    """A limit for each column of a table."""

    def __init__(self, limits):
        self.limits = limits

    def __call__(self, w):
        return keras.ops.minimum(w, np.array(self.limits, "float32"))

    def get_config(self):
        return {"limits": self.limits}


def test_constraint_may_have_numbers_for_the_columns_of_its_table():
    config = config_of(optimizers.SGD(), None, AtMost([0.1] * 7), None)
    check_elementwise(config, 7)
    with pytest.raises(ValueError, match="constraint .*AtMost cannot be applied"):
        check_elementwise(config, 5)


def test_regularizer_and_constraint_are_those_of_the_touched_rows():
    start = np.ones((4, 2), "float32")
    weights = tf.Variable(start)
    rows = rows_of(
        optimizers.SGD(1.0),
        weights,
        regularizer=keras.regularizers.L2(0.25),
        constraint=keras.constraints.NonNeg(),
    )
    ids = tf.constant([1, 2])
    gradient = rows.regularized(ids, tf.constant([[0.0, 3.0], [0.25, 0.0]]))
    # Twice 0.25 times the weight.
    np.testing.assert_allclose(gradient, [[0.5, 3.5], [0.75, 0.5]])
    rows.apply(ids, gradient, tf.constant(1.0), tf.zeros([0]), tf.constant(0, tf.int64))
    np.testing.assert_allclose(weights, [[1, 1], [0.5, 0.0], [0.25, 0.5], [1, 1]])


@for_each("option", [{"use_ema": True}, {"gradient_accumulation_steps": 2}])
def test_refuses_what_needs_all_rows(option):
    with pytest.raises(ValueError, match="is not supported for rows.*Received: "):
        config_of(optimizers.SGD(0.1, **option), None, None, None)
