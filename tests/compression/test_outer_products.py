import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import outer_products
from tests.compression.common import at
from tests.support.tables import for_each

ROWS, COLUMNS = 48, 56
# The first is worth it, the second is not.
INNER = (4, 20)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def matrices(*shapes):
    return [tf.TensorSpec(shape) for shape in shapes]


@for_each("inner", INNER)
@for_each("known", [True, False])
def test_a_sum_is_what_its_parts_add_up_to(inner, known):
    matrix, left, right = numbers(ROWS, COLUMNS), numbers(inner, ROWS), numbers(inner, COLUMNS)
    q, p = numbers(COLUMNS, 3), numbers(ROWS, 3)
    low_rank = numbers(3, ROWS, seed=1), numbers(3, COLUMNS, seed=2)

    def parts(left, right):
        total = outer_products.MatrixPlusOuterProduct(
            tf.constant(matrix), outer_products.OuterProduct(left, right), 2, matrix.shape
        )
        assert total.shape == matrix.shape
        taken = outer_products.OuterProduct(*map(tf.constant, low_rank))
        parts = total.times(q), total.transposed_times(p), total.minus(taken, taken.whole())
        assert [part.shape for part in parts] == [(ROWS, 3), (COLUMNS, 3), (ROWS, COLUMNS)]
        return parts

    size = inner if known else None
    found = traced(parts, *matrices([size, ROWS], [size, COLUMNS]))(
        tf.constant(left), tf.constant(right)
    )
    whole = matrix + 2 * left.T @ right
    expected = whole @ q, whole.T @ p, whole - low_rank[0].T @ low_rank[1]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_batch_without_rows_adds_nothing():
    def times(left, right):
        return outer_products.MatrixPlusOuterProduct(
            tf.ones([6, 5]), outer_products.OuterProduct(left, right), 2, [6, 5]
        ).times(tf.ones([5, 1]))

    found = traced(times, *matrices([None, 6], [None, 5]))(tf.zeros([0, 6]), tf.zeros([0, 5]))
    np.testing.assert_array_equal(found, np.full([6, 1], 5.0))


def test_gradients_of_dense_layers_are_products():
    layer = keras.layers.Dense(5, activation="relu")
    layer.build([None, 9])

    def found(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        gradient = tape.gradient(loss, layer.kernel.value)
        gradient = tf.ensure_shape(tf.identity(gradient), [9, 5])
        return gradient, outer_products.find_outer_product(gradient).whole()

    gradient, whole = traced(found, tf.TensorSpec([None, 9]))(tf.constant(numbers(4, 9)))
    np.testing.assert_array_equal(gradient, whole)


def test_factors_wait_for_what_their_product_waits_for():
    def check(a, b):
        first = tf.negative(a)
        product = tf.matmul(a, b, transpose_a=True)
        with tf.control_dependencies([first]):
            made_later = tf.matmul(a, b, transpose_a=True)
            waiting = tf.identity(product)
        for found in (
            outer_products.find_outer_product(made_later),
            outer_products.find_outer_product(waiting),
        ):
            assert [factor.op.control_inputs for factor in found] == [[first.op]] * 2

    traced(check, *matrices([2, 3], [2, 3]))


@for_each(
    "make",
    [
        lambda a, b: tf.matmul(a, b, transpose_b=True),
        lambda a, b: tf.matmul(a, b, transpose_a=True) * 2,
        lambda a, b: tf.matmul(*(tf.cast(x, tf.float16) for x in (a, b)), transpose_a=True),
        lambda a, b: tf.matmul(a[tf.newaxis], b[tf.newaxis], transpose_a=True),
        lambda a, b: a,
    ],
)
def test_others_are_none(make):
    found = []
    traced(
        lambda a, b: found.append(outer_products.find_outer_product(make(a, b))),
        *matrices([6, 6], [6, 6]),
    )
    assert found == [None]


def test_without_a_graph_there_are_none():
    assert (
        outer_products.find_outer_product(
            tf.matmul(tf.ones([2, 3]), tf.ones([2, 3]), transpose_a=True)
        )
        is None
    )


def averaged(feedback, lefts, rights, states, step):
    """Means and new states of two workers, each with a product for a gradient, in one graph."""
    exchanges = [
        feedback.exchange(outer_products.OuterProduct(left, right).whole(), state, step)
        for left, right, state in zip(lefts, rights, states)
    ]
    means = None
    while True:
        results, asked = [], []
        for generator in exchanges:
            try:
                asked.append(generator.send(means))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return [(mean, state) for mean, _, state in results]
        means = [sum(parts) / len(parts) for parts in zip(*asked)]


@for_each("inner", INNER)
@for_each("times", [1, 3])
def test_powersgd_makes_the_same_of_factors(inner, times, monkeypatch):
    feedback = compression.ErrorFeedback(compression.PowerSGD(2)).times(times)

    def trained():
        states = [feedback.init([ROWS, COLUMNS], "float32") for _ in range(2)]
        step = tf.function(
            lambda lefts, rights, states: averaged(feedback, lefts, rights, states, at(0)),
            autograph=False,
        )
        for number in range(5):
            lefts = [tf.constant(numbers(inner, ROWS, seed=10 * number + i)) for i in range(2)]
            rights = [tf.constant(numbers(inner, COLUMNS, seed=50 * number + i)) for i in range(2)]
            (mean, *_), (other, *_) = results = step(lefts, rights, states)
            np.testing.assert_array_equal(mean, other)
            states = [state for _, state in results]
        return [mean, *tf.nest.flatten(states)]

    from_factors = trained()
    with monkeypatch.context() as patch:
        patch.setattr(outer_products, "find_outer_product", lambda tensor: None)
        expected = trained()
    for one, other in zip(from_factors, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


def test_the_gradient_itself_is_not_made():
    feedback = compression.ErrorFeedback(compression.PowerSGD(2))
    gradients = []

    def step(left, right):
        gradients.append(outer_products.OuterProduct(left, right).whole())
        exchange = feedback.exchange(gradients[0], feedback.init([ROWS, COLUMNS], "float32"), at(0))
        payload = next(exchange)
        payload = exchange.send(payload)
        with pytest.raises(StopIteration) as stop:
            exchange.send(payload)
        return stop.value.value

    graph = traced(step, *matrices([INNER[0], ROWS], [INNER[0], COLUMNS])).graph
    assert gradients[0].op not in _needed(graph)


def _needed(graph):
    """The operations that a function's results come from."""
    found, left = set(), [tensor.op for tensor in graph.outputs]
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


class Clipped(compression.PowerSGD):
    def exchange(self, tensor, state, step):
        return super().exchange(tf.clip_by_value(tensor, -1, 1), state, step)


class Added(compression.ErrorFeedback):
    def add(self, tensor, state):
        return 2 * super().add(tensor, state)


@for_each(
    "feedback",
    [
        compression.ErrorFeedback(Clipped(2)),
        Added(compression.PowerSGD(2)),
        compression.ErrorFeedback(compression.PowerSGD(2), momentum=0.5),
    ],
)
def test_what_needs_a_tensor_gets_one(feedback):
    left, right = numbers(2, ROWS), numbers(2, COLUMNS)
    state = feedback.init([ROWS, COLUMNS], "float32")

    def step(left, right):
        assert (
            outer_products.find_outer_product(outer_products.OuterProduct(left, right).whole())
            is not None
        )
        (first, _), (second, _) = averaged(feedback, [left] * 2, [right] * 2, [state] * 2, at(0))
        return first

    mean = traced(step, *matrices(left.shape, right.shape))(tf.constant(left), tf.constant(right))
    whole = tf.constant(left.T @ right)
    exchange = feedback.exchange(whole, state, at(0))
    payload = exchange.send(next(exchange))
    with pytest.raises(StopIteration) as stop:
        exchange.send(payload)
    np.testing.assert_allclose(mean, stop.value.value[0], rtol=1e-4, atol=1e-4)


def test_small_matrices_are_sent_whole():
    feedback = compression.ErrorFeedback(compression.PowerSGD(4))

    def step(left, right):
        exchange = feedback.exchange(
            outer_products.OuterProduct(left, right).whole(),
            feedback.init([6, 5], "float32"),
            at(0),
        )
        (payload,) = next(exchange)
        return payload

    left, right = numbers(1, 6), numbers(1, 5)
    payload = traced(step, *matrices([1, 6], [1, 5]))(tf.constant(left), tf.constant(right))
    np.testing.assert_allclose(payload, left.T @ right, rtol=1e-6)


@for_each("bad", [np.nan, np.inf])
@for_each("inner", INNER)
def test_what_is_not_finite_comes_out_and_leaves_the_state(bad, inner):
    feedback = compression.ErrorFeedback(compression.PowerSGD(2))
    before = feedback.init([ROWS, COLUMNS], "float32")
    lefts = [tf.constant(numbers(inner, ROWS, seed=i)) for i in range(2)]
    rights = [numbers(inner, COLUMNS, seed=i) for i in range(2)]
    rights[1][0, 3] = bad
    step = tf.function(
        lambda lefts, rights: averaged(feedback, lefts, rights, [before, before], at(0)),
        autograph=False,
    )
    for mean, after in step(lefts, list(map(tf.constant, rights))):
        assert not np.isfinite(mean).any()
        for old, new in zip(tf.nest.flatten(before), tf.nest.flatten(after)):
            np.testing.assert_array_equal(old, new)
