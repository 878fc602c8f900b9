import re

from keras_psplus import compression
from tests.support.tables import for_each

INT8, SIGN, TOPK = compression.Int8(), compression.Sign(), compression.TopK(0.1)
BY_VARIABLE = compression.ByVariable(
    {"*/embeddings": None, re.compile(r"dense_\d+/kernel$"): INT8, "model/dense/*": SIGN},
    default=TOPK,
)


@for_each(
    "path, expected",
    [
        ("model/word/embeddings", None),
        ("model/dense_3/kernel", INT8),
        ("model/dense/kernel", SIGN),
        ("other/model/dense/kernel", TOPK),
        ("model/Dense_3/kernel", TOPK),
    ],
)
def test_the_first_pattern_that_fits_counts(path, expected):
    assert BY_VARIABLE.for_variable(path, [100, 100], "float32") is expected


def test_small_variables_vectors_and_integers_are_left_alone():
    assert BY_VARIABLE.for_variable("model/dense/kernel", [31, 33], "float32") is None
    assert BY_VARIABLE.for_variable("model/dense/kernel", [32, 32], "float32") is SIGN
    assert BY_VARIABLE.for_variable("model/dense/bias", [5000], "float32") is None
    assert BY_VARIABLE.for_variable("model/dense/kernel", [100, 100], "int64") is None
    cast = compression.Cast()
    every = compression.ByVariable({}, cast, min_size=0, min_rank=0)
    assert every.for_variable("scale", [], "float32") is cast
    # What is said there of vectors comes first.
    every = compression.ByVariable({}, INT8, min_size=0, min_rank=0)
    assert every.for_variable("bias", [5000], "float32") is None


def test_it_asks_the_one_it_has_chosen():
    powersgd = compression.ByVariable({"*": compression.PowerSGD(64)})
    assert powersgd.for_variable("w", [100, 100], "float32") is None
