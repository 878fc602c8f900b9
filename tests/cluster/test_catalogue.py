import json
import sys

import pytest

from keras_psplus.catalogue import lookup
from tests.support.tables import for_each


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A catalogue of its own, as a checkout has it."""
    folder = tmp_path / "strategies"
    folder.mkdir()
    for name in ("single", "all_reduce"):
        (folder / f"{name}.py").write_text(f"def strategy():\n    return {name!r}\n")
    (folder / "no_function.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("import no_such_module_at_all\n")
    (folder / "_helper.py").write_text("value = 'helped'\n")
    (folder / "relative.py").write_text(
        "from keras_psplus.strategies import _helper\n\ndef strategy():\n    return _helper.value\n"
    )
    monkeypatch.setattr(lookup, "_FOLDERS", (tmp_path / "none", folder))
    monkeypatch.setattr(lookup, "_PACKAGE", "keras_psplus_test.strategies")
    monkeypatch.setitem(sys.modules, "keras_psplus_test", type(sys)("keras_psplus_test"))
    monkeypatch.delenv(lookup.STRATEGY_VARIABLE, raising=False)
    for variable in ("TF_CONFIG", *lookup.OPTION_VARIABLES.values()):
        monkeypatch.delenv(variable, raising=False)
    (folder / "relative.py").write_text(
        "from . import _helper\n\n\ndef strategy():\n    return _helper.value\n"
    )
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("keras_psplus_"):
            del sys.modules[name]


@pytest.mark.parametrize("with_init", [False, True])
def test_entries_by_name(folder, with_init):
    if with_init:
        (folder / "__init__.py").write_text('"""The catalogue."""\n')
    assert lookup.names() == ["all_reduce", "broken", "no_function", "relative", "single"]
    assert lookup.load("single").strategy() == "single"
    assert lookup.load("relative").strategy() == "helped"
    assert lookup.load("single") is lookup.load("single")


def test_file(folder, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def strategy():\n    return 'mine'\n")
    assert lookup.load(path).strategy() == lookup.load(str(path)).strategy() == "mine"


def test_strategy_follows_the_environment(folder, monkeypatch):
    assert lookup.strategy_from_env() == "single"
    assert lookup.strategy_from_env(default="relative") == "helped"
    cluster = {"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert lookup.strategy_from_env() == "all_reduce"
    monkeypatch.setenv(lookup.STRATEGY_VARIABLE, "relative")
    assert lookup.strategy_from_env(default="single") == "helped"


def test_options_of_the_environment(folder, monkeypatch):
    (folder / "open.py").write_text("def strategy(**options):\n    return options\n")
    monkeypatch.setenv(lookup.STRATEGY_VARIABLE, "open")
    assert lookup.strategy_from_env() == {}
    monkeypatch.setenv("KERAS_PSPLUS_COMPRESSION", "powersgd:2")
    assert lookup.strategy_from_env() == {"compression": "powersgd:2"}
    monkeypatch.setenv(lookup.STRATEGY_VARIABLE, "single")
    with pytest.raises(ValueError, match="single takes no `compression`.*=powersgd:2$"):
        lookup.strategy_from_env()


@for_each(
    "name, message",
    [
        ("nothing", "no entry 'nothing'. Give one of all_reduce, broken"),
        ("_helper", "no entry '_helper'"),
        ("no_such.py", "no file 'no_such.py'"),
        ("no_function", "defines no function `strategy()`"),
    ],
)
def test_mistakes_list_the_entries(folder, name, message):
    with pytest.raises(ValueError) as error:
        lookup.load(name)
    assert message in str(error.value)
    assert str(error.value).endswith(f"Received: {name!r}")


def test_errors_in_an_entry_are_shown_as_they_are(folder, tmp_path):
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        lookup.load("broken")
    with pytest.raises(ModuleNotFoundError):
        lookup.load(folder / "broken.py")
    assert "keras_psplus_strategy_broken" not in sys.modules
