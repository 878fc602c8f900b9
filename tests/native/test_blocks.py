"""The kernels for blocks of few bits, beside TensorFlow's own operations, bit by bit."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression, native
from keras_psplus.all_reduce.collectives.hop import Hop, Joined
from keras_psplus.all_reduce.reduction.methods import codings
from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.compression import wire as fused
from tests.compression.common import at
from tests.support.tables import for_each
from tests.support.tiers import extended

kernels = native.kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no C++ compiler, or a GPU")
COMPRESSORS = [compression.Int8(16), compression.Sign(32)]
SHAPES = [(2, 7), (3, 1000), *extended(((3, 110_001),))]
KINDS = ["normal", "halves", "zeros", "tiny", "tiny and not", "huge", "nan", "infinite"]


def filled(kind, shape, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape).astype("f4")
    flat = values.reshape(-1)
    if kind == "halves":
        # With such a largest magnitude, they are rounded as they are.
        flat[:] = rng.integers(-126, 126, flat.size) + 0.5
        flat[::16] = 127
    elif kind == "zeros":
        values[:] = 0
    elif kind == "tiny":
        values *= np.float32(1e-37)
    elif kind == "tiny and not":
        values *= np.float32(1.5e-36)
    elif kind == "huge":
        flat[:] = np.sign(flat) * np.float32(3.4e38) * rng.random(flat.size)
    elif kind == "nan":
        flat[flat.size // 2] = np.nan
    elif kind == "infinite":
        flat[flat.size // 2] = -np.inf
    return values


def encode_by_tensorflow(feedback, rows, state, step):
    total = feedback.add(rows, state)
    payload = feedback.inner.encode_rows(total, step)
    own = feedback.inner.decode_rows(payload, rows.shape[1:], tf.float32, step)
    return payload, feedback.keep(rows, total, payload, own, state["inner"], state)


def encode_by_kernel(feedback, rows, state, step):
    payload, keep = fused.encode_rows(feedback, rows, state, step)
    return payload, keep(lambda: pytest.fail("not to be decoded"))


def in_graph(encode, feedback):
    @functools.partial(tf.function, autograph=False)
    def run(rows, residual):
        # Nobody else holds the negative: what is left is written where it is.
        return encode(feedback, -rows, {"residual": residual, "inner": ()}, at(0))

    return run


def assert_alike(found, expected, scale=None):
    """Same bits; given the scale of the data, sums may have been rounded in another order."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if scale is None:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_what_is_left_are_the_same(shape, compressor):
    feedback, of_bytes = compression.ErrorFeedback(compressor), type(compressor) is compression.Int8
    by_kernel = in_graph(encode_by_kernel, feedback)
    by_tensorflow = in_graph(encode_by_tensorflow, feedback)
    graph = by_kernel.get_concrete_function(tf.zeros(shape), tf.zeros(shape)).graph
    assert [op.type for op in graph.get_operations()].count("KerasPsplusEncodeBlocks") == 1
    for kind in KINDS:
        rows = tf.constant(filled(kind, shape))
        residual = 0.1 * filled("normal", shape, seed=1)
        if kind in ("halves", "zeros", "tiny", "tiny and not"):
            residual[:] = 0
        payload, state = by_kernel(rows, residual)
        expected, expected_state = by_tensorflow(rows, residual)
        finite = np.isfinite(expected[1])
        assert kind == "huge" or finite.all() == (kind not in ("nan", "infinite"))
        scale = None if of_bytes else expected[1].numpy()[finite].max(initial=0)
        assert_alike(payload[1], expected[1], scale)
        # Codes say nothing where the scale is no number.
        known = np.repeat(finite, compressor.block_size // (1 if of_bytes else 32), 1)
        known = tf.constant(known[:, : expected[0].shape[1]])
        assert_alike(*(tf.where(known, codes, 0) for codes in (payload[0], expected[0])))
        assert state["inner"] == ()
        assert_alike(state["residual"], expected_state["residual"], scale)
        if not finite.all():
            np.testing.assert_array_equal(state["residual"], residual)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_their_sum_are_decoded_to_the_same(shape, compressor):
    @functools.partial(tf.function, autograph=False)
    def both(*payload):
        rows, width = shape
        decoded = compressor.decode_rows(payload, (width,), tf.float32, at(0))
        expected = decoded, tf.add_n(tf.split(decoded, rows))
        return expected, (
            fused.decode_rows(compressor, payload, width, at(0)),
            fused.decode_sum(compressor, payload, width, rows, at(0)),
        )

    for kind in KINDS:
        expected, found = both(*compressor.encode_rows(tf.constant(filled(kind, shape)), at(0)))
        for one, other in zip(found, expected):
            assert_alike(one, other)


@for_each("compressor", [compression.Int8(), compression.Sign()])
def test_many_rows_are_added_in_their_order(compressor):
    payload = compressor.encode_rows(tf.constant(filled("normal", (20, 700))), at(0))
    total = np.float32(0)
    for row in compressor.decode_rows(payload, (700,), tf.float32, at(0)).numpy():
        total = total + row
    found = fused.decode_sum(compressor, payload, 700, 20, at(0))
    np.testing.assert_array_equal(found, total[np.newaxis])


def test_a_tensor_that_others_hold_stays_what_it_is():
    tensor, residual = filled("normal", (2, 700)), filled("normal", (2, 700), seed=1)
    held = tf.constant(tensor)
    kernels.keras_psplus_encode_blocks(residual=residual, tensor=held, block=256, code=tf.int8)
    np.testing.assert_array_equal(held, tensor)


class Pair:
    """A launcher of two workers, of which one is not there."""

    def all_to_all(self, words):
        # As if the other sent what it is sent.
        return words

    def gather(self, words):
        return tf.concat([words] * 2, 0)


@pytest.mark.parametrize("sizes", [[1000, 77, 3], *extended([90_000])])
@pytest.mark.parametrize(
    "compressor",
    [
        compression.Int8(error_feedback=False),
        compression.ErrorFeedback(compression.Sign()),
        compression.ErrorFeedback(compression.Int8(), momentum=0.9),
    ],
    ids=repr,
)
def test_sums_of_workers_and_their_states_are_the_same(compressor, sizes, monkeypatch):
    def train():
        example = [tf.zeros([size]) for size in sizes]
        states, sums = ReplicaStates("CPU:0"), []

        @functools.partial(tf.function, autograph=False)
        def run(tensors):
            layout = Joined(tensors, 2, compressor.row_multiple)
            both = codings(compressor, at(0), states, "rows")
            return layout.wholes(Hop(Pair(), range(2), 0).sum_rows(layout.rows(), both))

        for step in range(4):
            tensors = [tf.constant(filled("normal", [size], seed=step)) for size in sizes]
            if step == 2:
                tensors[0] *= np.nan
            sums.append(run(tensors))
        types = [op.type for op in run.get_concrete_function(example).graph.get_operations()]
        return sums, {name: one.numpy() for name, one in states.variables.items()}, types

    sums, state, types = train()
    assert types.count("KerasPsplusDecodeBlocks") == 2
    feedback = isinstance(compressor, compression.ErrorFeedback)
    # With momentum, what comes back from the other worker has none.
    expected_encoders = (1 + compressor.is_plain) if feedback else 0
    assert types.count("KerasPsplusEncodeBlocks") == expected_encoders
    monkeypatch.setenv("KERAS_PSPLUS_NATIVE", "0")
    expected_sums, expected_state, types = train()
    assert not [kind for kind in types if "KerasPsplus" in kind]
    tf.nest.assert_same_structure(state, expected_state)
    scale = 1 if feedback and type(compressor.inner) is compression.Sign else None
    for found, expected in zip(
        tf.nest.flatten([sums, state]), tf.nest.flatten([expected_sums, expected_state])
    ):
        assert_alike(found, expected, scale)


class Own(compression.Int8):
    """May send what it likes."""


class OwnSign(compression.Sign):
    """May send what it likes."""


@for_each(
    "compressor, decodes",
    [
        (compression.ErrorFeedback(Own()), False),
        (compression.ErrorFeedback(OwnSign()), False),
        (compression.ErrorFeedback(compression.Int8(stochastic=True)), False),
        (compression.ErrorFeedback(compression.RandomK(0.1)), False),
        (compression.ErrorFeedback(compression.Int8(), momentum=0.9), True),
        (compression.ErrorFeedback(compression.Int8()).times(2), True),
        (compression.Int8(), True),
    ],
)
def test_others_are_encoded_by_themselves(compressor, decodes):
    feedback = isinstance(compressor, compression.ErrorFeedback)
    inner = compressor.inner if feedback else compressor

    @functools.partial(tf.function, autograph=False)
    def run(rows):
        state = compressor.init(rows.shape, tf.float32)
        payload, keep = fused.encode_rows(compressor, rows, state, at(0))
        own = fused.decode_rows(inner, payload, 500, at(0))
        return own, fused.decode_sum(inner, payload, 500, 2, at(0)), keep(lambda: own)

    graph = run.get_concrete_function(tf.zeros([2, 500])).graph
    own = [op.type for op in graph.get_operations() if "KerasPsplus" in op.type]
    assert own == ["KerasPsplusDecodeBlocks"] * (2 * decodes)


def test_halves_are_encoded_by_themselves():
    feedback = compression.ErrorFeedback(compression.Int8())
    rows = tf.cast(filled("normal", (2, 700)), tf.float16)
    state = feedback.init([2, 700], tf.float32)
    payload, keep = fused.encode_rows(feedback, rows, state, at(0))
    expected, expected_state = encode_by_tensorflow(feedback, rows, state, at(0))
    decoded = fused.decode_rows(feedback.inner, payload, 700, at(0))
    for one, other in zip(payload, expected):
        assert_alike(one, other)
    assert_alike(keep(lambda: decoded)["residual"], expected_state["residual"])


@for_each(
    "residual, tensor, block, code, message",
    [
        ([2, 5], [2, 6], 4, tf.int8, "matrices of one shape"),
        ([5, 2], [2, 5], 4, tf.int8, "matrices of one shape"),
        ([10], [10], 4, tf.int8, "matrices of one shape"),
        ([1, 2, 5], [1, 2, 5], 32, tf.int32, "matrices of one shape"),
        ([2, 5], [2, 5], 33, tf.int32, "block must be a multiple of 32"),
        ([2, 5], [2, 5], 0, tf.int8, "at least minimum 1"),
    ],
)
def test_what_cannot_be_encoded_is_refused(residual, tensor, block, code, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        kernels.keras_psplus_encode_blocks(
            residual=tf.zeros(residual), tensor=tf.zeros(tensor), block=block, code=code
        )


@for_each(
    "code, codes, scales, block, message",
    [
        (tf.int8, [2, 69], [2, 3], 32, "of rows of 70 elements"),
        (tf.int8, [2, 70], [2, 2], 32, "of rows of 70 elements"),
        (tf.int8, [2, 70], [1, 3], 32, "of rows of 70 elements"),
        (tf.int8, [0, 70], [0, 3], 32, "of rows of 70 elements"),
        (tf.int8, [140], [6], 32, "of rows of 70 elements"),
        (tf.int32, [2, 70], [2, 3], 32, "of rows of 70 elements"),
        (tf.int32, [2, 3], [2, 3], 16, "block must be a multiple of 32"),
    ],
)
@for_each("add_up", [False, True])
def test_what_cannot_be_decoded_is_refused(code, codes, scales, block, message, add_up):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        kernels.keras_psplus_decode_blocks(
            codes=tf.zeros(codes, code), scales=tf.zeros(scales), block=block, width=70, sum=add_up
        )


def test_shapes_are_known_to_graphs():
    @functools.partial(tf.function, autograph=False)
    def run(rows, payload):
        encode = functools.partial(kernels.keras_psplus_encode_blocks, residual=rows, tensor=rows)
        decode = functools.partial(kernels.keras_psplus_decode_blocks, *payload, block=32, width=70)
        shapes.extend([*encode(block=32, code=tf.int8), *encode(block=64, code=tf.int32)])
        shapes.extend([decode(sum=False), decode(sum=True)])
        shapes[:] = [tensor.shape.as_list() for tensor in shapes]

    for rows in 2, None:
        shapes = []
        run.get_concrete_function(
            tf.TensorSpec([rows, 70]),
            (tf.TensorSpec([rows, 3], tf.int32), tf.TensorSpec([rows, 3])),
        )
        assert shapes == [
            *([rows, 70], [rows, 3], [rows, 70]),
            *([rows, 3], [rows, 2], [rows, 70]),
            *([rows, 70], [1, 70]),
        ]
