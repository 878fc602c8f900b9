"""Strategies by name, and what one that the script makes itself does with the launcher's flags."""

import json
import sys

import pytest
import tensorflow as tf

import keras_psplus
from keras_psplus import catalogue, specs
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE
from tests.docs import pages
from tests.support.tables import for_each

MAKERS = [
    keras_psplus.MultiWorkerMirroredStrategy,
    keras_psplus.HybridStrategy,
    keras_psplus.PipelineStrategy,
]


@pytest.fixture
def made(monkeypatch):
    """Makes the strategy that variables name, where classes say what they are given."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for strategy in {entry.strategy for entry in catalogue.ENTRIES.values()} - {None}:
        monkeypatch.setattr(keras_psplus, strategy, lambda _name=strategy, **given: (_name, given))

    def make(strategy=None, default=None, **options):
        given = {"strategy": strategy, **options}
        for name in ("strategy", *catalogue.OPTION_VARIABLES):
            monkeypatch.setenv(f"KERAS_PSPLUS_{name.upper()}", given.get(name) or "")
        return catalogue.strategy_from_env(default)

    return make


def write(path, text):
    path.write_text(text)
    return str(path)


def test_entries(made):
    assert list(catalogue.ENTRIES) == sorted(catalogue.ENTRIES)
    for name, entry in catalogue.ENTRIES.items():
        if name == "single":
            assert made(name) is tf.distribute.get_strategy()
            continue
        assert made(name) == (entry.strategy, entry.arguments)
        for option, forms in (("compression", specs.COMPRESSION), ("updates", specs.UPDATES)):
            text = entry.arguments.get(option)
            assert text is None or specs.parse(text, forms) is not None


def test_the_manual_lists_the_entries():
    lines = (pages.ROOT / "docs" / "choose.md").read_text().splitlines()
    for name, entry in catalogue.ENTRIES.items():
        given = ", ".join(f"{k}={json.dumps(v)}" for k, v in entry.arguments.items())
        made = f"{entry.strategy}({given})" if entry.strategy else "tf.distribute.get_strategy()"
        assert f"| `{name}` | {entry.title} | `{made}` |" in lines


def test_strategy_follows_the_environment(made, monkeypatch):
    assert made() is tf.distribute.get_strategy()
    assert made(default="hybrid") == ("HybridStrategy", {})
    cluster = {"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert made() == ("MultiWorkerMirroredStrategy", {})
    assert made("hybrid", default="single") == ("HybridStrategy", {})
    # It is not in the cluster.
    cluster["task"]["type"] = "evaluator"
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert made("hybrid") is tf.distribute.get_strategy()


def test_options_of_the_environment(made):
    found = made("async_parameter_server", compression="int8", updates="accumulate:2")
    assert found == ("ParameterServerStrategy", {"compression": "int8", "updates": "accumulate:2"})
    with pytest.raises(ValueError, match="single has no `compression`: take.*=powersgd:2$"):
        made("single", compression="powersgd:2")


def test_a_file_is_a_module_of_its_own(made, tmp_path):
    mine = write(
        tmp_path / "mine.py",
        "import keras_psplus\n"
        "def strategy(**options):\n"
        "    return keras_psplus.HybridStrategy(sync=False, **options)\n",
    )
    try:
        assert made(mine) == ("HybridStrategy", {"sync": False})
        assert made(mine, updates="accumulate:2")[1] == {"sync": False, "updates": "accumulate:2"}
        assert sys.modules["keras_psplus_strategy_mine"].__file__ == mine
    finally:
        sys.modules.pop("keras_psplus_strategy_mine", None)


@for_each(
    "text, error, message",
    [
        ("x = 1", ValueError, "no_good.py defines no function `strategy\\(\\)`.*Received: '/"),
        ("def strategy(:", SyntaxError, "no_good.py"),
        ("import no_such_module_at_all", ModuleNotFoundError, "no_such_module_at_all"),
        ("def strategy(updates): pass", ValueError, "no `compression`: write .*ION=int8$"),
    ],
)
def test_files_that_are_refused(text, error, message, made, tmp_path):
    with pytest.raises(error, match=message):
        made(write(tmp_path / "no_good.py", text), compression="int8")
    if error is not ValueError:
        assert "keras_psplus_strategy_no_good" not in sys.modules


@for_each(
    "name, message",
    [
        ("nothing", "no entry 'nothing'. Give one of accumulated_all_reduce, accum"),
        ("_helper", "no entry '_helper'"),
        ("no_such.py", "no file 'no_such.py'"),
        ("all_redcue", "Did you mean 'all_reduce'?"),
    ],
)
def test_mistakes_list_the_entries(name, message):
    with pytest.raises(ValueError) as error:
        catalogue.find(name)
    assert message in str(error.value)
    assert str(error.value).endswith(f"Received: {name!r}")


@pytest.fixture
def said(monkeypatch, caplog):
    """Sets variables, makes something, and returns it with what was said."""

    def make(maker, **flags):
        monkeypatch.setattr("keras_psplus.log._logged", set())
        for variable in (
            *catalogue.OPTION_VARIABLES.values(),
            catalogue.STRATEGY_VARIABLE,
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
    assert said(catalogue.strategy_from_env, **flags)[1] == ""
    assert said(catalogue.strategy_from_env, strategy="all_reduce_int8")[1] == ""
    assert said(catalogue.strategy_from_env, strategy="hybrid", updates="accumulate:2")[1] == ""


def test_a_plan_is_of_what_the_script_makes(said):
    maker = keras_psplus.MultiWorkerMirroredStrategy
    assert said(maker, compression="int8", strategy="single", plan='{"file": ""}')[1] == ""
