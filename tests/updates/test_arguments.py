"""Arguments out of range are refused, with the range and what was received."""

import keras
import pytest

import keras_psplus
from keras_psplus.updates import Accumulate, DiLoCo, LocalSGD

COUNTS = (0, -1, 1.0, True, None, "4")


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda v=v: Accumulate(v), "`steps` must be an int from 1 up") for v in COUNTS]
    + [(lambda v=v: LocalSGD(v), "`every` must be an int from 1 up") for v in COUNTS]
    + [(lambda v=v: DiLoCo(v), "`every` must be an int from 1 up") for v in COUNTS]
    + [
        (lambda: Accumulate(4, flush=1), "`flush` must be True or False"),
        (lambda: LocalSGD(4, start_step=-1), "`start_step` must be an int from 0 up"),
        (lambda: LocalSGD(4, start_step=1.5), "`start_step` must be an int"),
        (lambda: LocalSGD(4, average_slots="yes"), "`average_slots` must be True or False"),
        (lambda: DiLoCo(8, fragments=0), "`fragments` must be an int from 1 up"),
        (lambda: DiLoCo(8, fragments=True), "`fragments` must be an int"),
        (lambda: DiLoCo(8, fragments=3), "`every` must be divisible by `fragments`"),
        (lambda: DiLoCo(2, fragments=4), "`every` must be divisible by `fragments`"),
        (lambda: DiLoCo(8, overlap_steps=-1), "`overlap_steps` must be an int"),
        (lambda: DiLoCo(8, overlap_steps=8), "`overlap_steps` must be below every / fragments = 8"),
        (lambda: DiLoCo(8, fragments=4, overlap_steps=2), "below every / fragments = 2"),
        (lambda: DiLoCo(1, overlap_steps=1), "below every / fragments = 1"),
        (lambda: DiLoCo(8, alpha=1.0), r"`alpha` must be in \[0, 1\)"),
        (lambda: DiLoCo(8, alpha=-0.1), r"`alpha` must be in \[0, 1\)"),
        (lambda: DiLoCo(8, alpha=True), r"`alpha` must be in \[0, 1\)"),
        (lambda: DiLoCo(8, alpha=float("nan")), r"`alpha` must be in \[0, 1\)"),
        (lambda: DiLoCo(8, outer_optimizer=0.7), "`outer_optimizer` must be a function"),
        (lambda: DiLoCo(8, outer_optimizer=None), "`outer_optimizer` must be a function"),
        (lambda: DiLoCo(8, outer_optimizer="nonsense"), "`outer_optimizer` must name an optimizer"),
        (lambda: DiLoCo(8, outer_optimizer={"class": "SGD"}), "have its `class_name`"),
    ],
)
def test_out_of_range(make, message):
    with pytest.raises(ValueError, match=f"{message}.*Received: "):
        make()


@pytest.mark.parametrize("wrong", [4, "diloco", {"every": 4}, Accumulate, LocalSGD, True])
def test_strategies_take_instances_only(wrong):
    with pytest.raises(ValueError, match=r"Accumulate\(steps\).*Received: updates="):
        keras_psplus.MultiWorkerMirroredStrategy(updates=wrong)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("accumulate:4", "Accumulate(steps=4, flush=False)"),
        ("local_sgd:8", "LocalSGD(every=8, start_step=0, average_slots=False)"),
        ("diloco:100", "DiLoCo(every=100, "),
    ],
)
def test_texts_for_them(text, shown):
    assert repr(keras_psplus.updates.get(text)).startswith(shown)
    assert repr(keras_psplus.MultiWorkerMirroredStrategy(updates=text).updates).startswith(shown)


@pytest.mark.parametrize("text", ["accumulate", "accumulate:", "accumulate:0", "local_sgd:1:2", ""])
def test_texts_for_none(text):
    with pytest.raises(ValueError, match="Received: "):
        keras_psplus.updates.get(text)


def test_what_was_given_is_shown():
    assert repr(Accumulate(4)) == "Accumulate(steps=4, flush=False)"
    local = LocalSGD(8, average_slots=True)
    assert repr(local) == "LocalSGD(every=8, start_step=0, average_slots=True)"
    assert "fragments=2, overlap_steps=1, alpha=0.5" in repr(
        DiLoCo(4, fragments=2, overlap_steps=1)
    )


def test_alpha_follows_the_overlap():
    assert DiLoCo(4).alpha == 0.0
    assert DiLoCo(4, overlap_steps=2).alpha == 0.5
    assert DiLoCo(4, overlap_steps=2, alpha=0.0).alpha == 0.0
    assert DiLoCo(4, alpha=0.25).alpha == 0.25


def test_outer_optimizers():
    default = DiLoCo(4).make_outer_optimizer()
    assert isinstance(default, keras.optimizers.SGD)
    assert float(default.learning_rate) == pytest.approx(0.7)
    assert (default.momentum, default.nesterov) == (0.9, True)
    given = keras.optimizers.Adam(0.5, beta_1=0.8)
    for outer in (
        given,
        lambda: keras.optimizers.Adam(0.5, beta_1=0.8),
        keras.optimizers.serialize(given),
    ):
        made = DiLoCo(4, outer).make_outer_optimizer()
        assert made is not given
        assert made.beta_1 == 0.8
        assert float(made.learning_rate) == 0.5
    assert isinstance(DiLoCo(4, "adam").make_outer_optimizer(), keras.optimizers.Adam)


@pytest.mark.parametrize(
    "outer",
    [
        lambda: 0.7,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
    ],
)
def test_outer_optimizers_that_make_no_sense(outer):
    with pytest.raises(ValueError, match="must make a Keras optimizer.*Received: "):
        DiLoCo(4, outer).make_outer_optimizer()


def test_a_misspelt_argument_of_a_strategy_is_named():
    psp = keras_psplus
    for make in (psp.MultiWorkerMirroredStrategy, psp.HybridStrategy, psp.ParameterServerStrategy):
        with pytest.raises(TypeError, match=r"Did you mean `updates`\? Received: update='diloco'"):
            make(update="diloco")
    with pytest.raises(TypeError, match="PipelineStrategy has no argument `shard`"):
        psp.PipelineStrategy(shard="all")
