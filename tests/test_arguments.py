"""Whatever a constructor is given, it makes an object that works, or says what it received."""

import fractions
import functools
import types

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import keras_psplus
from keras_psplus import arguments, compression, updates
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy
from keras_psplus.hybrid import strategy as hybrid
from keras_psplus.parameter_server import strategy as parameter_server

VALUES = st.one_of(
    st.integers(),
    st.sampled_from([2**31, 2**62, 2**63, 10**12, 10**30, 10**400, -(10**400)]),
    st.floats(),
    st.fractions(),
    st.booleans(),
    st.booleans().map(np.bool_),
    st.integers(-3, 200).map(np.int64),
    st.floats(width=32).map(np.float32),
    st.sampled_from(["", "int8", "powersgd:1000000000", "topk:nan", "int8:-1", "sign:10", "a\0b"]),
    st.text(max_size=5),
    st.sampled_from(["int8:", "topk:", "powersgd:", "randomk:"]).flatmap(
        lambda name: st.one_of(st.integers(), st.floats()).map(lambda number: f"{name}{number}")
    ),
    st.sampled_from([None, b"x", 1j, object(), [], (), {}, {"*": 5}, np.zeros(3), np.zeros([])]),
    st.lists(st.integers(), max_size=2),
)

COMPRESSORS = {
    compression.Int8: {"block_size": 256, "stochastic": False, "seed": 0, "error_feedback": None},
    compression.Sign: {"block_size": 1024, "error_feedback": True},
    compression.Cast: {"dtype": "bfloat16", "error_feedback": False},
    compression.PowerSGD: {
        "rank": 2,
        "warm_start": True,
        "min_compression_rate": 2,
        "start_step": 0,
        "seed": 0,
        "error_feedback": True,
    },
    compression.SufficientFactors: {"dtype": None, "min_compression_rate": 1},
    compression.TopK: {
        "density": 0.1,
        "warmup_epochs": 2,
        "steps_per_epoch": 3,
        "momentum_correction": 0.0,
        "factor_masking": True,
        "error_feedback": True,
    },
    compression.RandomK: {"density": 0.1, "unbiased": False, "seed": 0, "error_feedback": None},
    compression.ByVariable: {"patterns": {}, "default": None, "min_size": 9, "min_rank": 2},
    functools.partial(compression.ErrorFeedback, compression.Int8()): {
        "momentum": 0.0,
        "factor_masking": False,
    },
    compression.get: {"identifier": "int8"},
}
UPDATES = {
    updates.Accumulate: {"steps": 4, "flush": False},
    updates.LocalSGD: {"every": 4, "start_step": 0, "average_slots": False},
    updates.DiLoCo: {"every": 8, "fragments": 2, "overlap_steps": 1, "alpha": None},
}
TIMES = {"startup_timeout": 60.0, "stall_warning": 60.0}
STRATEGIES = {
    MultiWorkerMirroredStrategy: {
        **TIMES,
        "cluster_resolver": None,
        "communication_options": None,
        "heartbeat_timeout": 20.0,
        "bucket_bytes": 1000,
        "compression": None,
        "updates": None,
    },
    hybrid.HybridStrategy: {
        **TIMES,
        "heartbeat_timeout": 20.0,
        "placement": "auto",
        "min_table_bytes": 0,
        "sync": True,
        "prefetch": False,
        "row_compression": None,
        "pull_compression": None,
        "table_timeout": 60.0,
        "tables_dir": None,
        "job_token": None,
    },
    parameter_server.ParameterServerStrategy: {
        **TIMES,
        "cluster_resolver": None,
        "variable_partitioner": "auto",
        "heartbeat_timeout": 60.0,
        "compression": None,
        "pull_compression": None,
        "mode": "async",
        "backup_workers": 0,
        "max_staleness": None,
        "updates": None,
        "overlap_steps": False,
    },
}


def cases(makers):
    return [(make, name) for make, options in makers.items() for name in options]


def named(case):
    return getattr(case, "__name__", "ErrorFeedback") if callable(case) else case


def made(make, options, name, value):
    """What is made of valid options and one value, None if it is refused as it should be."""
    try:
        return make(**{**options, name: value})
    except (ValueError, TypeError) as error:
        assert "Received: " in str(error), f"{name}={arguments.shown(value)}: {error}"
        return None


fuzz = hypothesis.settings(
    max_examples=30,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.mark.parametrize(("make", "name"), cases(COMPRESSORS), ids=named)
@fuzz
@hypothesis.given(value=VALUES)
def test_compressors(make, name, value):
    compressor = made(make, COMPRESSORS[make], name, value)
    if compressor is None:
        return
    assert repr(compressor)
    compressor = compression.with_error_feedback(compressor)
    chosen = compressor.for_variable("dense/kernel", [64, 64], "float32")
    if chosen is not None:
        assert chosen.wire_bytes([64, 64], "float32", 5) >= 0
    if isinstance(chosen, compression.SufficientFactors):
        assert chosen.most_rows([64, 64], 2) >= 0


@pytest.mark.parametrize(("make", "name"), cases(UPDATES), ids=named)
@fuzz
@hypothesis.given(value=VALUES)
def test_updates(make, name, value):
    policy = made(make, UPDATES[make], name, value)
    if policy is not None:
        # They are part of TensorFlow's graphs, added to one another.
        numbers = [n for n in vars(policy).values() if isinstance(n, int)]
        tf.constant(sum(numbers), tf.int64)


class Checked(Exception):
    """All arguments have been taken."""


@pytest.fixture
def checks_alone(monkeypatch):
    """Ends constructors when they have checked their arguments."""

    def end(*args, **kwargs):
        raise Checked

    monkeypatch.setattr(MultiWorkerMirroredStrategy, "_start", staticmethod(end))
    monkeypatch.setattr(hybrid, "find", types.SimpleNamespace(find_task_config=end))
    monkeypatch.setattr(parameter_server, "read_task", end)


@pytest.mark.parametrize(("make", "name"), cases(STRATEGIES), ids=named)
@fuzz
@hypothesis.given(value=VALUES)
def test_strategies(make, name, value, checks_alone):
    try:
        assert made(make, STRATEGIES[make], name, value) is None
    except Checked:
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: updates.Accumulate(10**30),
        lambda: updates.LocalSGD(10**30),
        lambda: updates.DiLoCo(10**30),
        lambda: compression.get("powersgd:1000000000"),
        lambda: compression.Int8(10**12),
        lambda: compression.Sign(32 * 10**12),
        lambda: compression.TopK(0.1, warmup_epochs=10**9, steps_per_epoch=1),
        lambda: compression.SufficientFactors(min_compression_rate=1e-320),
        lambda: compression.PowerSGD(2, min_compression_rate=10**400),
        lambda: keras_psplus.HybridStrategy(tables_dir=5),
        lambda: keras_psplus.HybridStrategy(tables_dir=""),
        lambda: keras_psplus.HybridStrategy(job_token=5),
        lambda: keras_psplus.HybridStrategy(table_timeout=1e30),
        lambda: keras_psplus.HybridStrategy(startup_timeout=float("inf")),
        lambda: keras_psplus.ParameterServerStrategy(startup_timeout=float("inf")),
        lambda: keras_psplus.ParameterServerStrategy(heartbeat_timeout=1e30),
        lambda: keras_psplus.MultiWorkerMirroredStrategy(heartbeat_timeout=1e30),
        lambda: keras_psplus.MultiWorkerMirroredStrategy(stall_warning=1e30),
        lambda: keras_psplus.MultiWorkerMirroredStrategy(bucket_bytes=1e300),
    ],
)
def test_what_would_fail_late_is_refused_at_once(make, checks_alone):
    with pytest.raises(ValueError, match="Received: "):
        make()


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["large", "small"])
def test_ints_that_python_does_not_write_down_are_refused(value):
    for make in (updates.Accumulate, compression.TopK, compression.Int8):
        with pytest.raises(ValueError, match="Received: .*=a int too long to be shown"):
            make(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda value: keras_psplus.MultiWorkerMirroredStrategy(compression=value),
        lambda value: keras_psplus.MultiWorkerMirroredStrategy(updates=value),
        lambda value: keras_psplus.HybridStrategy(placement=value),
        lambda value: keras_psplus.HybridStrategy(placement={"*": value}),
        lambda value: keras_psplus.HybridStrategy(row_compression=value),
        lambda value: keras_psplus.HybridStrategy(tables_dir=value),
        lambda value: keras_psplus.ParameterServerStrategy(mode=value),
        lambda value: updates.DiLoCo(8, outer_optimizer=value),
        lambda value: compression.Cast(value),
    ],
)
def test_such_ints_are_refused_where_none_is_expected(make, checks_alone):
    with pytest.raises(ValueError, match="Received: .*a (int|dict) too long to be shown"):
        make(10**5000)


def test_the_kinds_of_numbers_that_libraries_have_are_taken(checks_alone):
    with pytest.raises(Checked):
        keras_psplus.HybridStrategy(
            sync=np.bool_(True),
            prefetch=np.bool_(False),
            min_table_bytes=np.int64(5),
            table_timeout=np.float32(3),
            startup_timeout=fractions.Fraction(61, 2),
        )
    assert arguments.seconds("timeout", arguments.MOST_SECONDS) == arguments.MOST_SECONDS
