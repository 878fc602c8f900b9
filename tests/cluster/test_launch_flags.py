"""What a strategy that the script makes itself does with the launcher's flags."""

import pytest

import keras_psplus
from keras_psplus.catalogue import lookup
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE
from keras_psplus.cluster.launcher import launch_flags

MAKERS = [
    keras_psplus.MultiWorkerMirroredStrategy,
    keras_psplus.HybridStrategy,
    keras_psplus.PipelineStrategy,
]


@pytest.fixture
def said(monkeypatch, caplog):
    """Sets variables, makes something, and returns it with what was said."""

    def make(maker, **flags):
        monkeypatch.setattr("keras_psplus.log._logged", set())
        for variable in (
            *launch_flags.OPTION_VARIABLES.values(),
            launch_flags.STRATEGY_VARIABLE,
            MIN_WORKERS_VARIABLE,
        ):
            monkeypatch.delenv(variable, raising=False)
        for flag, value in flags.items():
            monkeypatch.setenv(f"KERAS_PSPLUS_{flag.upper()}", value)
        caplog.clear()
        made = maker()
        said = [record.getMessage() for record in caplog.records if record.name == "keras_psplus"]
        return made, "\n".join(said)

    return make


@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_said_without_flags(maker, said):
    assert said(maker)[1] == ""


@pytest.mark.parametrize("maker", MAKERS[:2])
def test_what_the_script_does_not_give_is_taken(maker, said):
    strategy, text = said(maker, compression="int8", updates="accumulate:4")
    assert f"{maker.__name__} takes compression='int8' from --compression int8" in text
    assert "takes updates='accumulate:4'" in text and "no effect" not in text
    assert strategy.updates.steps == 4
    with pytest.raises(ValueError, match="Received: "):
        said(maker, compression="nonsense")


@pytest.mark.parametrize("maker", MAKERS)
def test_strategies_that_need_all_workers_refuse_a_range(maker, said):
    for least, message in (
        ("1", f"alone; {maker.__name__} needs all of"),
        ("one", "the number of"),
    ):
        with pytest.raises(ClusterConfigError, match=f"{message}.*Received: KERAS_.*='?{least}"):
            said(maker, min_workers=least)


def test_strategies_say_what_they_are(said):
    maker = keras_psplus.MultiWorkerMirroredStrategy
    text = "<MultiWorkerMirroredStrategy(compression='int8'): no cluster>"
    assert repr(said(maker, compression="int8")[0]) == text
    hybrid, _ = said(keras_psplus.HybridStrategy)
    assert repr(hybrid) == "<HybridStrategy(placement='auto', sync=True): no cluster>"
    pipeline, _ = said(lambda: keras_psplus.PipelineStrategy(2))
    assert repr(pipeline).startswith("<PipelineStrategy(microbatches=2, ")


def test_flags_without_effect_are_named(said):
    _, text = said(
        lambda: keras_psplus.MultiWorkerMirroredStrategy(compression="bf16"),
        compression="int8",
        strategy="hybrid",
    )
    assert "--compression int8 (KERAS_PSPLUS_COMPRESSION) has no effect: " in text
    assert "gives `compression` itself" in text
    assert "--strategy hybrid (KERAS_PSPLUS_STRATEGY) has no effect" in text
    _, text = said(keras_psplus.PipelineStrategy, compression="int8", updates="diloco:9")
    assert "has no `compression` here" in text and "has no `updates` here" in text
    # The same in other words.
    same = lambda: keras_psplus.MultiWorkerMirroredStrategy(compression="int8")  # noqa: E731
    assert said(same, compression="int8", strategy="all_reduce")[1] == ""


def test_the_catalogue_reads_the_flags_itself(said):
    flags = {"strategy": "all_reduce", "compression": "int8"}
    assert said(lookup.strategy_from_env, **flags)[1] == ""
    assert said(lookup.strategy_from_env, strategy="all_reduce_int8")[1] == ""
    assert said(lookup.strategy_from_env, strategy="hybrid", updates="accumulate:2")[1] == ""


def test_a_plan_is_of_what_the_script_makes(said):
    maker = keras_psplus.MultiWorkerMirroredStrategy
    assert said(maker, compression="int8", strategy="single", plan='{"file": ""}')[1] == ""
