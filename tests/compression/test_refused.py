"""What is no option of a compressor, and no tensor for one, is refused by name."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import (
    ByVariable,
    Cast,
    ErrorFeedback,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    SufficientFactors,
    TopK,
)
from tests.compression.common import at
from tests.support.tables import for_each

NO_INTS = (True, "4", None, 4.0, 1.5, [4])
NO_NUMBERS = (True, "0.5", None, float("nan"), 1j)
NO_FRACTIONS = (*NO_NUMBERS, 0, -0.1, 1.1)
NO_SEEDS = ("a", None, 1.5, True, 2**63, -(2**63) - 1)
SPARSE, RANDOM, LOW_RANK = partial(TopK, 0.1), partial(RandomK, 0.1), partial(PowerSGD, 2)
# What is made, an option, what the option is not, and what it must be.
OPTIONS = [
    (PowerSGD, "rank", (*NO_INTS, 0, -1), "an int from 1 up"),
    (Int8, "block_size", (*NO_INTS, 0, -32), "an int from 1"),
    (Sign, "block_size", (*NO_INTS, 0, -32, 33), "(an int from 32|a multiple of 32)"),
    (partial(TopK, 0.5, warmup_epochs=1), "steps_per_epoch", NO_INTS, "an int from"),
    (partial(ByVariable, {}), "min_size", NO_INTS, "an int from"),
    (LOW_RANK, "start_step", [-1], "an int from 0"),
    (LOW_RANK, "min_compression_rate", (*NO_NUMBERS, -1), ""),
    (SufficientFactors, "min_compression_rate", [0, "2"], ""),
    (TopK, "density", NO_FRACTIONS, r"in \(0, 1\]"),
    (RandomK, "density", NO_FRACTIONS, r"in \(0, 1\]"),
    (SPARSE, "momentum_correction", (*NO_NUMBERS, 1.0), ""),
    (partial(ErrorFeedback, Sign()), "momentum", (*NO_NUMBERS, 1), ""),
    (SufficientFactors, "dtype", ["int8"], ""),
    (Cast, "dtype", ["float32", "int8", None], "one of "),
    (ByVariable, "patterns", (["int8"], "int8", None), "a dict "),
    (
        ErrorFeedback,
        "inner",
        [
            *(None, "int8", ErrorFeedback(Cast()), ByVariable({}), SufficientFactors()),
            RandomK(0.05, unbiased=True),
        ],
        "",
    ),
    *(
        (make, name, ("no", 1, 0.0, []), "True(,| or) False")
        for name, makers in {
            "stochastic": [Int8],
            "warm_start": [LOW_RANK],
            "unbiased": [RANDOM],
            "factor_masking": [SPARSE, partial(ErrorFeedback, Sign())],
            "error_feedback": [Cast, Int8, Sign, SPARSE, RANDOM, LOW_RANK],
        }.items()
        for make in makers
    ),
    (Int8, "stochastic", [None], "True or False"),
    (Sign, "error_feedback", [None], "True or False"),
    (partial(Int8, stochastic=True), "seed", NO_SEEDS, "an int that fits in 64 bits"),
    (RANDOM, "seed", NO_SEEDS, "an int that fits in 64 bits"),
    (LOW_RANK, "seed", NO_SEEDS, "an int that fits in 64 bits"),
]
IDENTIFIERS = [
    *("", "int7", "topk", "topk:", "topk:few", "topk:0.1:2", "powersgd", "powersgd:1.5"),
    *("bf16:2", 8, "factors:", "factors:int8", "factors:4", "factors:bf16:2"),
    *(Int8, {"*": "int7"}, ["int8"]),
]
OTHERS = [
    (lambda: SPARSE(warmup_epochs=4), "Received: steps_per_epoch=None"),
    (lambda: RANDOM(unbiased=True, error_feedback=True), "choose one. Received: unbiased=True"),
    (lambda: ByVariable({"*": "int8"}), "a pattern must .* Received: "),
    (lambda: ByVariable({1: Int8()}), "a pattern must .* Received: "),
    *(
        (lambda name=name: compression.get(name), "must be .* Received: ")
        for name in ("topk:0", "topk:nan", "randomk:2", "powersgd:0", "int8:0")
    ),
    *(
        (lambda one=one: compression.get(one), '`comp.*` must be "bf16".* Received: compression')
        for one in IDENTIFIERS
    ),
    (
        lambda: compression.get("gzip", "pull", "this or that"),
        "^`pull` must be this or that. Received: pull='gzip'$",
    ),
    (
        lambda: compression.get({"a*": "gzip"}, "pull", "this or that"),
        r"^`pull\['a\*'\]` must be this or that. Received: pull\['a\*'\]='gzip'$",
    ),
]
ONE_ROW = [Cast(), Int8(), Sign(), TopK(0.1)]


@for_each("make, option, values, must_be", OPTIONS)
def test_wrong_options(make, option, values, must_be):
    for value in values:
        with pytest.raises(ValueError, match=f"must be {must_be}.*Received: {option}=") as error:
            make(**{option: value})
        assert f"`{option}`" in str(error.value)


@for_each("make, message", OTHERS)
def test_wrong_identifiers_and_pairs_of_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_options_of_numpy_and_none_where_it_is_the_default():
    assert PowerSGD(np.int64(4)).rank == 4
    assert TopK(np.float32(0.5)).density == 0.5
    assert repr(Int8(np.int32(8))).startswith("Int8(block_size=8")
    assert PowerSGD(2, warm_start=np.bool_(True)).warm_start is True
    assert Sign(error_feedback=False).error_feedback is False
    assert Int8(error_feedback=None).error_feedback
    assert not RandomK(0.1, unbiased=True, error_feedback=None).error_feedback


@for_each("make", [partial(Int8, stochastic=True), RANDOM, LOW_RANK])
def test_seeds_are_ints_that_a_generator_takes(make):
    for seed in -(2**63), 2**63 - 1, np.int32(7):
        compressor = make(seed=seed)
        tensor = tf.random.stateless_normal([40, 30], [1, 2])
        state = compressor.init([40, 30], tf.float32)
        payload, _ = compressor.encode(tensor, state, at(3))
        assert np.isfinite(compressor.decode(payload, [40, 30], tf.float32, at(3))).all()


@for_each("compressor", [*ONE_ROW, PowerSGD(1)])
def test_other_than_floating_tensors_are_refused(compressor):
    for dtype in "complex64", "int32":
        state = compressor.init([20, 20], tf.float32)
        with pytest.raises(ValueError, match=f"floating type.* Received: dtype={dtype}"):
            compressor.encode(tf.ones([20, 20], dtype), state, at(0))


@for_each("compressor", ONE_ROW)
def test_tensors_have_static_shapes(compressor):
    message = r"static shape.* Received: shape=\(None, 3\)"
    for one in compressor, ErrorFeedback(compressor), PowerSGD(1):
        with pytest.raises(ValueError, match=message):
            one.wire_bytes([None, 3], "float32")
    with pytest.raises(ValueError, match="static shape.* Received: shape="):
        compressor.wire_bytes(None, "float32")

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def encode(tensor):
        return compressor.encode(tensor, (), at(0))

    with pytest.raises(ValueError, match=message):
        encode.get_concrete_function()


def test_one_that_asks_for_feedback_but_diverges():
    class Scaled(Cast):
        error_feedback, takes_feedback = True, False

        def __init__(self):
            self.dtype = "float16"

    with pytest.raises(ValueError, match="diverge.* Received: inner=Scaled"):
        compression.with_error_feedback(Scaled())


def test_payloads_that_cannot_be_averaged():
    with pytest.raises(ValueError, match="reducible compressor .* Received: Int8"):
        Int8().mean(tf.ones([3]), (), at(0), lambda tensors: tensors)
